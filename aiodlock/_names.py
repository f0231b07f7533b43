"""From the names that people use to keys, channels and owner tokens, there and back."""

from __future__ import annotations

import re
import secrets
import string
from typing import Final, Literal, NamedTuple

_NAME_BYTES_MAX: Final = 512
_PREFIX_BYTES_MAX: Final = 128
_LABEL: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VALUE: Final = re.compile(
    r"([A-Za-z0-9._-]{1,64}:[0-9a-f]{32}):([0-9]{1,20}(?:[rw]|s[0-9]{1,10})?)/([0-9]{1,20})"
)

Access = Literal["reading", "writing", "permit"]
_ACCESS: Final[dict[str, Access]] = {"r": "reading", "w": "writing", "s": "permit"}

# Braces would move the hash tag, so that a name's keys fell into several slots of a cluster.
_ESCAPES: Final = str.maketrans({"{": "%7B", "}": "%7D", "%": "%25"})


class Keys(NamedTuple):
    """The keys of one name; all of them in one hash slot."""

    lock: str
    fence: str
    queue: str
    alive: str

    @classmethod
    def of_lock_key(cls, lock: str) -> Keys:
        return cls(lock, f"{lock}:fence", f"{lock}:queue", f"{lock}:alive")

    @property
    def grants(self) -> str:
        """One more, where several may hold: which fencing token each of them has."""
        return f"{self.lock}:grants"


def keys(prefix: str, name: str) -> Keys:
    """The keys of *name*; `{`, `}` and `%` in it are percent-encoded."""
    return Keys.of_lock_key(f"{prefix}{{{name.translate(_ESCAPES)}}}")


def inbox(prefix: str, client_id: str) -> str:
    """The channel on which a client hears of hand-offs."""
    return f"{inbox_prefix(prefix)}{client_id}"


def inbox_prefix(prefix: str) -> str:
    """What every inbox channel under *prefix* begins with."""
    return f"{prefix}inbox:"


def new_client_id() -> str:
    """128 random bits in hexadecimal."""
    return secrets.token_hex(16)


class Value(NamedTuple):
    """What a lock's key holds, read: `<owner token>/<fencing token>`."""

    owner_token: str
    fencing_token: int
    holder: str

    @property
    def client_id(self) -> str:
        return self.holder.partition(":")[2]


def read_value(text: str) -> Value | None:
    """The parts of a value of ours; None for one that another library wrote."""
    match = _VALUE.fullmatch(text)
    if match is None:
        return None
    holder, number, fencing_token = match.groups()
    return Value(f"{holder}:{number}", int(fencing_token), holder)


def holder_of(label: str, client_id: str) -> str:
    """Who holds, as shown to people."""
    return f"{label}:{client_id}"


def owner_token(holder: str, number: int) -> str:
    """Unique to acquisition *number* (from 1) of *holder*."""
    return f"{holder}:{number}"


def holder_in(owner_token: str) -> str:
    """Who holds, as shown to people."""
    return owner_token.rpartition(":")[0]


def retired(owner_token: str) -> str:
    """What stands in its place where its lease is given up, but its name stays taken.

    Nobody's: no request of that acquisition, however late, finds its token there.
    """
    return f"{holder_in(owner_token)}:0"


def access_of(owner_token: str) -> Access | None:
    """What it asks for, where several may hold: its tail says so. None: a plain lock."""
    for letter in owner_token.rpartition(":")[2].strip("0123456789"):
        return _ACCESS.get(letter)
    return None


def limit_of(owner_token: str) -> float:
    """How many holders it bears, itself included; readers: of themselves one, beside a writer."""
    permits = owner_token.rpartition("s")[2]
    return int(permits) if access_of(owner_token) == "permit" else 1


def value_of(owner_token: str, fencing_token: int) -> str:
    """What a lock's key holds; `read_value` reads it."""
    return f"{owner_token}/{fencing_token}"


def holder(text: str) -> str:
    """Who holds, as shown to people; never a whole owner token of ours."""
    value = read_value(text)
    if value is not None:
        return value.holder
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def checked_name(name: object) -> str:
    """*name* if it may be locked."""
    allowed = f"a lock's name must be a non-empty str of at most {_NAME_BYTES_MAX} UTF-8 bytes"
    if not isinstance(name, str):
        raise TypeError(f"{allowed}; got {name!r}")
    if not 0 < _utf8_length(name, allowed) <= _NAME_BYTES_MAX:
        raise ValueError(f"{allowed}; got {name[:40]!r} with {len(name.encode())} bytes")
    return name


def checked_prefix(prefix: object) -> str:
    """*prefix* if keys may begin with it."""
    allowed = f"prefix must be a str of at most {_PREFIX_BYTES_MAX} UTF-8 bytes without {{ and }}"
    if not isinstance(prefix, str):
        raise TypeError(f"{allowed}; got {prefix!r}")
    if "{" in prefix or "}" in prefix or _utf8_length(prefix, allowed) > _PREFIX_BYTES_MAX:
        raise ValueError(f"{allowed}; got {prefix[:40]!r}")
    return prefix


def checked_label(label: object) -> str:
    """*label* if holders may be shown by it."""
    allowed = "label must be a str of 1 to 64 characters out of A-Z, a-z, 0-9, '.', '_' and '-'"
    if not isinstance(label, str):
        raise TypeError(f"{allowed}; got {label!r}")
    if not _LABEL.fullmatch(label):
        raise ValueError(f"{allowed}; got {label[:80]!r}")
    return label


def label_of_host(hostname: str, pid: int) -> str:
    """A label for clients that were given none: where to look for the holder."""
    letters = string.ascii_letters + string.digits + "._-"
    host = "".join(c if c in letters else "-" for c in hostname)[:48]
    return f"{host or 'host'}-{pid}"


def _utf8_length(text: str, allowed: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{allowed}; got {text[:40]!r}, which UTF-8 cannot hold") from None
