"""What stands under a name, told to people line by line, to programs as JSON."""

from __future__ import annotations

from typing import Any, Final

from aiodlock.cli._look import Grant, Look, granted_ago
from aiodlock.cli._screen import harmless, span
from aiodlock.cli._standing import Standing, Vote
from aiodlock.cli._table import Cell, table

HEAD: Final = ("name", "held as", "holder", "ttl left", "queue", "longest wait", "fencing token")
MAY_CUT: Final = (HEAD.index("name"), HEAD.index("holder"))
"""Where there is little room: a part of a number would be another one."""
# Of the 32 digits of a client id: enough to tell clients apart, and to find one in a log.
_DIGITS: Final = 8
_UNKNOWN: Final = "unknown type"  # what lua/look.lua says


def row(standing: Standing) -> list[Cell]:
    """One line of `ls`."""
    look = standing.look
    first = look.grants[0] if look.grants else None
    wait = look.longest_wait
    cells = (
        harmless(standing.name),
        held_as(look),
        _holders(standing),
        _ttl(first) if first else "-",
        str(look.queued),
        "-" if wait is None else span(wait),
        str(first.fencing_token or "-") if first else "-",
    )
    return [Cell(cell) for cell in cells]


def held_as(look: Look) -> str:
    """The kind, with how many hold."""
    if look.kind == "readers" and look.grants:
        return f"{look.inside} reader" + "s" * (look.inside > 1)
    if look.kind == "semaphore":
        return f"{look.inside} of {look.permits} permits"
    return look.kind


def lines(standing: Standing, *, waiters: int) -> list[str]:
    """All of it, for `show` and for `break`, with so many of the waiters."""
    look = standing.look
    facts = [("name", harmless(standing.name)), ("key", harmless(standing.key))]
    facts.append(("held as", held_as(look) if look.grants or look.not_a_lock else _free(standing)))
    if look.not_a_lock:
        facts.append(("what it is", f"a key of another type ({something(look.not_a_lock)})"))
    for grant in look.grants:
        facts += _of_grant(grant, look)
    if look.inside > len(look.grants):
        facts.append(("", f"and {look.inside - len(look.grants)} more holders"))
    if not look.grants and look.last_fencing_token:
        facts.append(("last fencing token", str(look.last_fencing_token)))
    facts.append(("waiters", str(look.queued)))
    told = [f"{what:18}  {said}".rstrip() for what, said in facts]
    return told + _queue(look, waiters) + _nodes(standing.votes)


def short(holder: str) -> str:
    """*holder* where there is little room."""
    label, colon, client_id = holder.partition(":")
    return harmless(f"{label}{colon}{client_id[:_DIGITS]}")


def something(type_: str) -> str:
    """A key of that type, or of one that the server did not tell."""
    return f"something of {type_}" if type_ == _UNKNOWN else f"a {harmless(type_)}"


def in_words(standing: Standing) -> str:
    """Who keeps it from being free, in one line."""
    look = standing.look
    if look.not_a_lock:
        return f"its key is no lock but {something(look.not_a_lock)}"
    if look.grants:
        first = look.grants[0]
        more = f" and {look.inside - 1} more" if look.inside > 1 else ""
        ttl = "without a ttl" if first.ttl_left is None else f"ttl left {span(first.ttl_left)}"
        return f"held by {harmless(first.holder)}{more}, {ttl}, waiters: {look.queued}"
    if standing.is_undecided:
        return "the nodes that answer do not tell who holds it"
    return "free" if look.is_free else f"free, but waited for, waiters: {look.queued}"


def as_json(standing: Standing) -> dict[str, Any]:
    """What `ls --json` says about one name."""
    look = standing.look
    first = look.grants[0] if look.grants else None
    return {
        "name": standing.name,
        "key": standing.key,
        "kind": look.kind,
        "held": None if standing.is_undecided else bool(look.grants),
        "holder": first and first.holder,
        "ttl_left": first and first.ttl_left,
        "fencing_token": first and first.fencing_token,
        "holders": [_grant_as_json(grant, look) for grant in look.grants],
        "inside": look.inside,
        "permits": look.permits,
        "waiters": look.queued,
        "longest_wait": look.longest_wait,
        "last_fencing_token": look.last_fencing_token,
        "not_a_lock": look.not_a_lock,
    }


def all_as_json(standing: Standing) -> dict[str, Any]:
    """What `show --json` says: the queue and the nodes, too."""
    queue = [
        {"holder": waiter.holder, "waited": waiter.waited, "alive_for": waiter.alive_for}
        for waiter in standing.look.waiters
    ]
    nodes = [_vote_as_json(vote) for vote in standing.votes]
    return as_json(standing) | {"queue": queue, "nodes": nodes}


def _holders(standing: Standing) -> str:
    look = standing.look
    if look.not_a_lock:
        return something(look.not_a_lock)
    if not look.grants:
        return "unknown" if standing.is_undecided else "nobody" + _minority(standing.votes)
    more = f" and {look.inside - 1} more" if look.inside > 1 else ""
    return short(look.grants[0].holder) + more


def _free(standing: Standing) -> str:
    if standing.is_undecided:
        return "not known: nodes that do not answer may have it"
    if standing.look.is_free:
        return "nothing: it is free" + _minority(standing.votes)
    return f"nothing: it goes to the first waiter ({standing.look.kind})"


def _minority(votes: tuple[Vote, ...]) -> str:
    has = sum(1 for vote in votes if vote.look is not None and vote.look.grants)
    return f" (a minority of nodes has something: {has} of {len(votes)})" if has else ""


def _of_grant(grant: Grant, look: Look) -> list[tuple[str, str]]:
    since = granted_ago(grant, look.now_us)
    ago = f" (granted {span(since)} ago)" if since is not None else ""
    doing = f", {grant.access}" if grant.access in ("reading", "writing") else ""
    return [
        ("holder", harmless(grant.holder) + doing + _after_release(grant)),
        ("  ttl left", _ttl(grant) + (": no end of its own" if grant.ttl_left is None else "")),
        ("  fencing token", f"{grant.fencing_token or 'none'}{ago}"),
    ]


def _after_release(grant: Grant) -> str:
    return ", who has released it; it is kept by hold_at_least" if grant.is_kept else ""


def _ttl(grant: Grant) -> str:
    return "none" if grant.ttl_left is None else span(grant.ttl_left)


def _queue(look: Look, most: int) -> list[str]:
    if not look.waiters:
        return []
    rows = [
        [
            Cell(str(place)),
            Cell(harmless(each.holder) + (f", {each.access}" if each.access else "")),
            Cell(span(each.waited)),
            Cell(_life(each.alive_for)),
        ]
        for place, each in enumerate(look.waiters[:most], 1)
    ]
    told = ["", *table(("place", "waiter", "has waited", "sign of life"), rows, coloured=False)]
    more = look.queued - len(rows)
    return told + ([f"and {more} more"] if more > 0 else [])


def _life(alive_for: float) -> str:
    if alive_for > 0:
        return f"alive, the next one is due within {span(alive_for)}"
    return f"overdue by {span(-alive_for)}: its turn will be skipped"


def _nodes(votes: tuple[Vote, ...]) -> list[str]:
    if not votes:
        return []
    head = ("node", "holder", "ttl left", "fencing token")
    return ["", *table(head, [_vote(vote) for vote in votes], coloured=False)]


def _vote(vote: Vote) -> list[Cell]:
    if vote.look is None:
        cells = (vote.node, f"no answer: {harmless(str(vote.error))}", "-", "-")
    elif vote.look.not_a_lock:
        cells = (vote.node, something(vote.look.not_a_lock), "-", "-")
    elif not vote.look.grants:
        cells = (vote.node, "nobody", "-", "-")
    else:
        first = vote.look.grants[0]
        more = f" and {vote.look.inside - 1} more" if vote.look.inside > 1 else ""
        cells = (
            vote.node,
            short(first.holder) + more,
            _ttl(first),
            str(first.fencing_token or "-"),
        )
    return [Cell(cell) for cell in cells]


def _grant_as_json(grant: Grant, look: Look) -> dict[str, Any]:
    return {
        "holder": grant.holder,
        "ttl_left": grant.ttl_left,
        "fencing_token": grant.fencing_token,
        "held_for": granted_ago(grant, look.now_us),
        "access": grant.access,
    }


def _vote_as_json(vote: Vote) -> dict[str, Any]:
    grants = vote.look.grants if vote.look else ()
    return {
        "node": vote.node,
        "trouble": None if vote.error is None else str(vote.error),
        "holders": [_grant_as_json(grant, vote.look) for grant in grants] if vote.look else [],
    }
