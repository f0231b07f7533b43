"""Distributed locks for asyncio, on Redis and Valkey.

To read the code, follow a name: `_client` makes a `_lock`; its acquisition (`_session`) waits
(`_waiting`) until the store (`_store`) grants a `_lease`, which a `_watchdog` extends until it is
released.
"""

import logging

from ._all import AllLeases, AllLocks
from ._client import LockClient
from ._election import Election, Leader, Term
from ._errors import (
    LeaseLostError,
    LockError,
    LockTimeout,
    LostReason,
    NameTakenError,
    NotAllowedError,
    QuorumError,
    ServerUnreachable,
)
from ._lease import Lease
from ._lock import Lock, LockInfo, Vote
from ._waiting import Backoff

__all__ = [
    "AllLeases",
    "AllLocks",
    "Backoff",
    "Election",
    "Leader",
    "Lease",
    "LeaseLostError",
    "Lock",
    "LockClient",
    "LockError",
    "LockInfo",
    "LockTimeout",
    "LostReason",
    "NameTakenError",
    "NotAllowedError",
    "QuorumError",
    "ServerUnreachable",
    "Term",
    "Vote",
]

logging.getLogger("aiodlock").addHandler(logging.NullHandler())
