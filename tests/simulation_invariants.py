"""What has to hold in every run of a simulation, whatever fails: looked at after each event of the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import coordinator.checkpoints
from coordinator.checkpoints import KEPT
from coordinator.loop import Loop
from coordinator.round_events import Event, Joined, Phase, Send
from fedmq.audit.log_checks import audit_run
from fedmq.federation.protocol import Update
from fedmq.wire.codec import digest
from tests.simulated_network import World


def differences_of(folder: Path, told: Iterable[str]) -> list[str]:
    """What the audit of a finished run finds, except for what the coordinator itself told.

    Args:
        folder: the run folder.
        told: among others, the errors with which the coordinator ended.
    """
    found = [f"{finding.place}: {finding.what}" for finding in audit_run(folder).findings]
    unsigned = any("coordinator.jsonl: could not be written" in error for error in told)
    return [what for what in found if not (unsigned and what.startswith("coordinator.jsonl: lacks its signed end"))]


#: Time after which a removed key has an effect, and messages sent before have arrived [s].
_REMOVAL_SECONDS = 1.0 + 0.2


class Invariants:
    """The invariants of a run.

    Attributes:
        events: number of events of the rounds.
        last: the last of them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # Digests of each honest silo's replies to each task, and when it sent them.
        self.honest: dict[tuple[str, int | None], tuple[list[list[str]], float]] = {}
        self._first: dict[tuple[str, int], Update] = {}
        self.removed: dict[str, float] = {}  # when the keys that are not accepted now were removed [s]
        self.loop: Loop | None = None  # the loop of the present coordinator
        self.events, self.last = 0, "none"
        self._merged: dict[tuple[str, int], int] = {}
        self._sent: set[tuple[str, int]] = set()
        self._complete: list[Path] = []

    # ------------------------------------------------------------------------------------------------------- events
    def after_event(self, loop: Loop, event: Event) -> None:
        """A silo that is back takes part, and has its pending task."""
        self.events, self.last = self.events + 1, str(event)
        rounds = loop.rounds
        assert not (out := rounds.gone & rounds.online), f"{min(out)} is back, but does not take part"
        if isinstance(event, Joined) and (task := rounds.pending.get(event.silo)) is not None:
            again = (event.silo, task.sequence) in self._sent or rounds.phase in (Phase.DONE, Phase.STOPPED)
            assert again, f"{event.silo} is back, but its task {task.sequence} is not sent again"

    def before_event(self) -> None:
        """Tasks are sent from now on."""
        self._sent = set()

    def sent(self, task: Send) -> None:
        """A task is sent."""
        self._sent.add((task.silo, task.sequence))

    def between_events(self) -> None:
        """A removed key has no session."""
        if self.loop is None:
            return
        for name, at in self.removed.items():
            late = self._world.now > at + _REMOVAL_SECONDS
            assert not (late and self.loop.roster.online(name)), f"{name} has a session, but its key was removed"

    def received(self, update: Update) -> None:
        """A valid reply is received; one to a task that is not outstanding does not count."""
        task = None if self.loop is None else self.loop.rounds.pending.get(update.silo.name)
        if task is not None and task.sequence == update.sequence:
            self._first.setdefault((update.silo.name, update.sequence), update)

    def merged(self, update: Update, version: int) -> None:
        """A merged reply is the first received of those that its silo sent with an accepted key; it counts once."""
        name, key = update.silo.name, (update.silo.name, update.sequence)
        assert key in self.honest, f"{key} is merged, but its silo never sent it"
        sent, at = self.honest[key]
        assert [*map(digest, update.payloads)] in sent, f"{key} is not what its silo sent"
        assert update is self._first[key], f"{key} is not the first reply"
        assert at < self.removed.get(name, at) + _REMOVAL_SECONDS, f"{key} is merged, but its key was removed"
        assert self._merged.setdefault(key, version) == version, f"{key} is merged twice"

    # -------------------------------------------------------------------------------------------------- checkpoints
    def writing(self, folder: Path) -> None:
        """While a checkpoint is written, the earlier ones are there."""
        missing = [path.name for path in self._complete if not path.exists()]
        assert not missing or len(list(folder.glob("version-*"))) >= KEPT, f"{missing[0]} was deleted too early"

    def saved(self, folder: Path, made: Path) -> None:
        """A checkpoint was written."""
        self._complete = [*self._complete, made][-KEPT:]
        self.restorable(folder)
        self._world.progress_at, self._world.steps = self._world.now, 0

    def ended(self, folder: Path) -> None:
        """The coordinator's process has ended."""
        self.loop, self._first = None, {}
        self.restorable(folder)

    def restorable(self, folder: Path) -> None:
        """The newest checkpoint, at least the last that was written, can be loaded."""
        loaded = coordinator.checkpoints.load(folder)
        version = -1 if loaded is None else loaded.rounds.version
        self._merged = {key: into for key, into in self._merged.items() if into < version}  # later ones are undone
        wanted = int(self._complete[-1].name.removeprefix("version-")) if self._complete else -1
        assert version >= wanted, f"checkpoint {wanted} was written, but {version} is the newest"

    def torn(self, newest: Path) -> None:
        """A checkpoint is lost, but not by a fault of the program."""
        self._complete = [path for path in self._complete if path != newest]
        self.restorable(newest.parent)

    # ------------------------------------------------------------------------------------------------------ watchdog
    def waiting(self, peers: Iterable[str]) -> str:
        """The last event, and what everybody waits for, in one line."""
        if self.loop is None:
            return f"last event: {self.last}; the coordinator has not begun; {'; '.join(peers)}"
        rounds, roster = self.loop.rounds, self.loop.roster
        tasks = [
            f"{name} for task {task.sequence} ({'online' if roster.online(name) else 'away'})"
            for name, task in rounds.pending.items()
        ]
        absent = sorted(set(rounds.plan.silos) - rounds.online)
        what = f"{rounds.phase} version {rounds.version}, waits for {', '.join(tasks) or 'no task'}; away: {absent}"
        return f"last event: {self.last}; coordinator: {what}; {'; '.join(peers)}"
