"""Turns what was seen of the three locks into a table, its meaning, or complaints."""

from collections.abc import Iterator

from aiodlock.cli import _history
from aiodlock.cli._demo_job import TTL_S
from aiodlock.cli._demo_part import Outcome
from aiodlock.cli._table import Cell, Tone

HEAD = ("lock", "grants", "two inside", "after the kill", "fencing tokens")


def row(outcome: Outcome) -> list[Cell]:
    """The lock's row of the table under `HEAD`."""
    overlaps = len(_history.overlaps(outcome.history))
    return [
        Cell(outcome.part.title),
        Cell(str(len(outcome.history))),
        Cell(str(overlaps), Tone.BAD if overlaps else Tone.GOOD),
        _after_the_kill(outcome),
        _tokens(outcome),
    ]


def complaints(naive: Outcome, unchecked: Outcome, ours: Outcome) -> list[str]:
    """Why the run does not show what it should; empty when it does.

    The two naive locks are the checker's control: if it finds nothing wrong with them, its word
    on ours is worth nothing.
    """
    found = [_nothing_seen(outcome) for outcome in (naive, unchecked, ours)]
    return [text for text in (*found, *_of_controls(naive, unchecked), *_of_ours(ours)) if text]


def meaning(naive: Outcome, unchecked: Outcome, ours: Outcome) -> list[str]:
    """What the table says, one text per lock, for a run without complaints."""
    outlasting = len(_history.longer_than(ours.history, TTL_S))
    overlaps = len(_history.overlaps(unchecked.history))
    gap = _history.longest_gap_after_kill(ours.history) or 0.0
    naive_text = (
        f"One killed holder stops everybody: {naive.waiting} processes waited"
        f" {naive.watched_after_kill:.1f} s for nothing, and would for ever."
    )
    unchecked_text = (
        "A job that outlasts the expiry loses the lock while it works on, then deletes the lock"
        f" of the next: {overlaps} entries found somebody inside."
    )
    our_text = (
        f"Jobs that outlasted the ttl: {outlasting}; nobody else got in. The next one went on"
        f" {gap:.2f} s after the kill (ttl {TTL_S:.2f} s), and the grants are numbered in order."
    )
    return [
        f"{naive.part.title}. {naive_text}",
        f"{unchecked.part.title}. {unchecked_text}",
        f"{ours.part.title}. {our_text}",
    ]


def _after_the_kill(outcome: Outcome) -> Cell:
    gap = _history.longest_gap_after_kill(outcome.history)
    if gap is not None:
        return Cell(f"next after {gap:.2f} s", Tone.GOOD)
    if outcome.victim is None:
        return Cell("no holder killed")
    return Cell(f"{outcome.waiting} stuck for {outcome.watched_after_kill:.1f} s", Tone.BAD)


def _tokens(outcome: Outcome) -> Cell:
    if all(stay.fencing_token is None for stay in outcome.history):
        return Cell("none")
    wrong = len(_history.out_of_order(outcome.history))
    return Cell(f"{wrong} out of order", Tone.BAD) if wrong else Cell("in order", Tone.GOOD)


def _nothing_seen(outcome: Outcome) -> str:
    if not outcome.history:
        return f"{outcome.part.title}: nobody was granted the lock"
    return "" if outcome.victim else f"{outcome.part.title}: no holder was killed"


def _of_controls(naive: Outcome, unchecked: Outcome) -> Iterator[str]:
    if naive.victim and (naive.grants_after_kill or not naive.waiting):
        yield f"{naive.part.title}: nobody was stuck after the kill, so the checker is in doubt"
    if not _history.overlaps(unchecked.history):
        yield f"{unchecked.part.title}: no overlap was found, so the checker is in doubt"


def _of_ours(ours: Outcome) -> Iterator[str]:
    title = ours.part.title
    if overlaps := len(_history.overlaps(ours.history)):
        yield f"{title}: {overlaps} times two processes were inside at once"
    if wrong := len(_history.out_of_order(ours.history)):
        yield f"{title}: {wrong} fencing tokens were missing or out of order"
    if ours.victim and not ours.grants_after_kill:
        yield f"{title}: nobody went on in the {ours.watched_after_kill:.1f} s after the kill"
    if not _history.longer_than(ours.history, TTL_S):
        yield f"{title}: no job outlasted the ttl, so extending was not shown"
    if ours.losses:
        yield f"{title}: {ours.losses} leases were lost before their job was done"
