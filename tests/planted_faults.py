"""Faults of the product that a simulation has to find: ``python -m tests.planted_faults [NAME ...]``.

Each is a change of a few words of one function. The command prints the first seed that finds each of them; a test
plants each and runs that seed.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from coordinator import checkpoints
from coordinator.loop import Loop
from coordinator.rounds import Rounds
from coordinator.sessions import Roster
from coordinator.timeline import Outcomes
from fedmq.wire.sessions import Session
from silos import program
from tests.simulation import Script, simulate, undisturbed


@dataclass(frozen=True)
class PlantedFault:
    """A fault.

    Args:
        seed: a seed whose run it breaks.
        function: the function that has it.
        edits: parts of the function's source, and what is in their place.
    """

    seed: int
    function: Callable[..., Any]
    edits: dict[str, str]


FAULTS = {
    "a checkpoint is written in place": PlantedFault(
        31,
        checkpoints.save,
        {'temporary = folder / f".{target.name}"': "temporary = target", "if target.exists():": "if False:"},
    ),
    "older checkpoints are deleted first": PlantedFault(
        1,
        checkpoints.save,
        {"    try:\n        shutil": "    [shutil.rmtree(old) for old in before[:-1]]\n    try:\n        shutil"},
    ),
    "the merge line is written after the checkpoint": PlantedFault(
        12,
        Loop._merge,
        {
            "append_metrics(self.run_context.folder, line, self.clock)": "pass",
            'self.counters.add_seconds("merge"': "append_metrics(self.run_context.folder, line, self.clock)\n    "
            'self.counters.add_seconds("merge"',
        },
    ),
    "states of pending tasks are dropped": PlantedFault(
        9, Loop._merge, {"*self.evaluation.versions}, self.rounds.pending)": "*self.evaluation.versions}, {})"}
    ),
    "a second outcome of a task replaces the first": PlantedFault(
        5,
        Outcomes.put,
        {"not self.is_open(pending, silo, sequence)": "silo not in pending or pending[silo].sequence != sequence"},
    ),
    "lost messages are not noticed": PlantedFault(1, Session.open, {"if header.counter != expected:": "if False:"}),
    "a full disk of a silo fails its task": PlantedFault(74, program.reply_to, {"except fatal:": "except ():"}),
    "a removed key keeps its session": PlantedFault(11, Roster.watch_keys, {"self._expel(name)": "pass"}),
    "a silo that returns does not take part": PlantedFault(
        20, Rounds.join_late, {"gone=self.gone - {event.silo}": "gone=self.gone"}
    ),
    "a silo that returns does not get its task": PlantedFault(1, Rounds.join, {"joined._resend((event.silo,))": "()"}),
}


@contextlib.contextmanager
def planted(fault: PlantedFault) -> Iterator[None]:
    """Have the product contain a fault."""
    function: Any = inspect.unwrap(fault.function)  # without the decorator that profiles it
    source = textwrap.dedent(inspect.getsource(function))
    for part, other in fault.edits.items():
        assert source.count(part) == 1, f"{function.__qualname__} has changed: {part}"
        source = source.replace(part, other)
    made: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{source}", function.__globals__, made)
    sound, function.__code__ = function.__code__, inspect.unwrap(made[function.__name__]).__code__
    try:
        yield
    finally:
        function.__code__ = sound


def finds(fault: PlantedFault, seed: int) -> str:
    """How a seed finds a fault; empty if it does not."""
    undisturbed(Script.of(seed).mode)  # computed once, by the sound product
    with planted(fault):
        try:
            simulate(seed)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    for name in sys.argv[1:] or FAULTS:
        found = ((seed, text) for seed in range(1, 101) if (text := finds(FAULTS[name], seed)))
        print(f"{name}: seed %s, %.300s" % next(found, ("none of 100", "")), flush=True)
