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
from ._observer import LockEvent, LostEvent, NotAcquiredEvent, Observer
from ._readers import Reader, Writer
from ._semaphore import Semaphore
from ._shared import Holder, SharedInfo
from ._waiting import Backoff

__all__ = [
    "AllLeases",
    "AllLocks",
    "Backoff",
    "Election",
    "Holder",
    "Leader",
    "Lease",
    "LeaseLostError",
    "Lock",
    "LockClient",
    "LockError",
    "LockEvent",
    "LockInfo",
    "LockTimeout",
    "LostEvent",
    "LostReason",
    "NameTakenError",
    "NotAcquiredEvent",
    "NotAllowedError",
    "Observer",
    "QuorumError",
    "Reader",
    "Semaphore",
    "ServerUnreachable",
    "SharedInfo",
    "Term",
    "Vote",
    "Writer",
]

logging.getLogger("aiodlock").addHandler(logging.NullHandler())
