"""Tells the demo as it goes: a line for what happened, a bar for what is going on."""

from aiodlock.cli import _history
from aiodlock.cli._demo_part import WORKERS, Outcome, Part, Scene, play
from aiodlock.cli._progress import Progress


class Show:
    """Plays the parts, and says what can be seen."""

    def __init__(self, progress: Progress, parts: int) -> None:
        self._progress = progress
        self._parts = parts
        self._number = 0

    async def play(self, part: Part, url: str, prefix: str) -> Outcome:
        """Play *part*; draw its progress, and leave three lines about it."""
        self._number += 1
        self._progress.line(f"{self._number}/{self._parts}  {part.title}")
        self._progress.show(0.0, f"starting {WORKERS} processes")
        outcome = await play(part, url, prefix, self)
        self._progress.line(f"     {_after(outcome)}")
        return outcome

    def killed(self, scene: Scene) -> None:
        """Say which holder was killed."""
        grants, victim = scene.journal.grants, scene.victim
        if victim is not None:
            text = f"process {victim + 1} killed in the middle of its job, grants so far: {grants}"
            self._progress.line(f"     {text}")

    def tick(self, scene: Scene) -> None:
        """Draw the bar."""
        self._progress.show(scene.seconds / scene.part.seconds, _live(scene))


def _after(outcome: Outcome) -> str:
    seconds, grants = outcome.watched_after_kill, outcome.grants_after_kill
    return f"in the {seconds:.1f} s after that, further grants: {grants}"


def _live(scene: Scene) -> str:
    grants, inside = scene.journal.grants, scene.journal.inside
    overlaps = len(_history.overlaps(scene.journal.ended))
    return f"{scene.seconds:4.1f} s  {grants:3} grants  {inside} inside  {overlaps:2} overlaps"
