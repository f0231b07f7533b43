"""Readers, who share a name, with the writer, who has it alone."""

from __future__ import annotations

from ._shared import Shared


class Reader(Shared):
    """Shares a name with other readers, never with a writer. Made by `LockClient.reader`.

    Readers and writers stand in one queue, so that neither keeps the other out for ever: who asks
    to read while a writer waits stands behind it. It is used as `Lock` is.
    """


class Writer(Shared):
    """Has a name alone, among readers and writers. Made by `LockClient.writer`.

    `await lease.downgrade()` makes a reader of it. It is used as `Lock` is.
    """
