"""One acquisition on every node of a quorum: where something of it may stand."""

from __future__ import annotations

import asyncio
from typing import Any

from ._api import Acquisition
from ._requests import Acquire


class Part:
    """An acquisition on one node."""

    def __init__(self, acquisition: Acquisition) -> None:
        self.acquisition = acquisition
        self.may_stand = False
        """Whether it stands there, or is on its way there, as far as is known."""
        self.is_late = False  # It could not be asked in the second round.
        self._taking: asyncio.Future[Any] | None = None
        self._call: Acquire | None = None

    def take(self, call: Acquire, answered: asyncio.Future[Any]) -> None:
        """An acquire is under way."""
        self.may_stand = True
        self._call, self._taking = call, answered

    @property
    def is_taking(self) -> bool:
        """Whether an acquire has left, or will, that is not answered."""
        return self._taking is not None and not self._taking.done()

    @property
    def is_unsent(self) -> bool:
        """Whether what is under way still waits for a connection."""
        return self.is_taking and self._call is not None and not self._call.sent_at

    def give_up(self) -> None:
        """Nothing of it may leave from now on: it would overtake its release, or come after it.

        What was sent is on its way all the same; but it is not sent once more, with its text.
        """
        if self.is_unsent:
            self.may_stand = False
        if self._taking is not None:
            self._taking.cancel()

    def find_absent(self) -> None:
        """The node says that it is not ours there."""
        self.may_stand = self.is_taking


class Ballot:
    """The parts, and what the quorum agreed on."""

    def __init__(self, acquisition: Acquisition, nodes: int) -> None:
        name, keys, token = acquisition.name, acquisition.keys, acquisition.token
        self.is_shared = acquisition.is_shared
        self.parts = [
            Part(Acquisition(name, keys, token, is_shared=self.is_shared)) for _ in range(nodes)
        ]
        self.fencing_token = 0  # 0: none, or none yet.
        self.is_over = False  # It is released: nothing may be taken for it any more.

    @classmethod
    def of_another(cls, acquisition: Acquisition, nodes: int) -> Ballot:
        """That of somebody else, for whoever breaks his lock."""
        ballot = cls(acquisition, nodes)
        for part in ballot.parts:
            part.may_stand = True
        return ballot
