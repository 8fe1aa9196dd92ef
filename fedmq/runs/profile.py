"""The profile of a run: where its processes spent their time, by party and phase, and as a file for speedscope.

The files of the processes are read as far as they go: one that was killed has lost its last spans, and its open ones
end with its file. All times are of the machine's monotonic clock, which its processes share.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

from fedmq.packages import __version__
from fedmq.profiling import COMMAND, PARTY, PHASES
from fedmq.storage.run_folder import RunFolder, write_bytes, write_text
from fedmq.text import as_csv
from fedmq.wire.messages import COORDINATOR, EVALUATOR

#: The time of a party that belongs to no phase.
OTHER = "other"
#: Phases in which a process does nothing.
_IDLE = ("wait", "slot")
#: Who is at work: each of them counts only while those before it are not.
_SILOS = "silos"
_ORDER = (f"the {COORDINATOR}", _SILOS, f"the {EVALUATOR}")
_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_MAIN = "MainThread"


class Event(NamedTuple):
    """A span of a thread opens (``O``) or closes (``C``) at a time [s]."""

    at: float
    kind: Literal["O", "C"]
    name: str


@dataclass(frozen=True)
class ThreadSpans:
    """The spans of a thread, well nested."""

    process: str
    file: str  # one for each start of the process
    thread: str
    events: tuple[Event, ...]

    def states(self) -> Iterator[tuple[float, tuple[str, str | None]]]:
        """From each time on [s], the thread's party and phase; the phase is None after the last span."""
        stack: list[str] = []
        for event in self.events:
            stack.append(event.name) if event.kind == "O" else stack.pop()
            who = next((name for name in reversed(stack) if name.startswith(PARTY)), PARTY + self.process)
            inner = stack[-1] if stack else None
            yield event.at, (who.removeprefix(PARTY), OTHER if inner == who else inner)


def read(folder: Path) -> list[ThreadSpans]:
    """The spans of all threads of a run, in the order in which the processes started."""
    found: list[ThreadSpans] = []
    for path in folder.glob("*.jsonl"):
        threads: dict[str, list[Event]] = {}
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError):  # the last line may be torn
                at, thread, kind, name = json.loads(line)
                threads.setdefault(thread, []).append(Event(float(at), kind, name))
        last = max((events[-1].at for events in threads.values()), default=0.0)
        process = path.name.rsplit(".", 2)[0]
        spans = (ThreadSpans(process, path.name, name, _nested(events, last)) for name, events in threads.items())
        found += sorted(spans, key=lambda thread: thread.thread != _MAIN)
    first = {each.file: each.events[0].at for each in reversed(found)}
    return sorted(found, key=lambda thread: (first[thread.file], thread.file))


def _nested(events: Sequence[Event], last: float) -> tuple[Event, ...]:
    """The events with the missing ends of spans: those within a span that closes, and the open ones at the end."""
    nested: list[Event] = []
    stack: list[str] = []
    for event in events:
        if event.kind == "O":
            stack.append(event.name)
            nested.append(event)
        elif event.name in stack:
            while stack[-1] != event.name:
                nested.append(Event(event.at, "C", stack.pop()))
            nested.append(Event(event.at, "C", stack.pop()))
    return (*nested, *(Event(last, "C", name) for name in reversed(stack)))


class Stretch(NamedTuple):
    """What a party does from one time to another [s]; the phase may be :data:`OTHER`."""

    began: float
    ended: float
    party: str
    phase: str


def stretches(threads: Sequence[ThreadSpans]) -> Iterator[Stretch]:
    """What each process of the threads of :func:`read` does, without gaps and overlaps.

    That is what its main thread does; but while that one waits, what another thread does.
    """
    for _, process in groupby(threads, attrgetter("file")):
        changes = [(at, place, state) for place, each in enumerate(process) for at, state in each.states()]
        now: dict[int, tuple[str, str | None]] = {}
        for (at, place, state), (until, *_) in pairwise(sorted(changes, key=lambda change: change[0])):
            now[place] = state
            busy = [each for _, each in sorted(now.items()) if each[1] not in (*_IDLE, OTHER, None)]
            party, phase = busy[0] if busy else now.get(0, ("", None))
            if until > at and phase is not None:
                yield Stretch(at, until, party, phase)


@dataclass(frozen=True)
class Profile:
    """Where the time of a run went."""

    # Seconds by party and phase; a party's sum is the time for which it existed.
    seconds: Mapping[str, Mapping[str, float]]
    # Seconds of the rounds, from the first training to the last merge, by who was at work: the coordinator, at least
    # one silo, the evaluator, several of them, or no one.
    rounds: Mapping[tuple[str, ...], float]
    merges: int  # number of merges

    @classmethod
    def of(cls, threads: Sequence[ThreadSpans]) -> Profile:
        """The profile of the threads of :func:`read`."""
        seconds: dict[str, Counter[str]] = {}
        found = list(stretches(threads))
        for each in found:
            spent = seconds.setdefault(each.party, Counter())
            spent[each.phase] += each.ended - each.began  # type: ignore[assignment]
        names = [event.name for thread in threads for event in thread.events if event.kind == "O"]
        return cls(seconds, _at_work(found), names.count("merge"))

    @property
    def silos(self) -> tuple[str, ...]:
        """The silos, and the processes that several silos share."""
        return tuple(sorted(filter(_is_silo, self.seconds)))

    def of_all(self, parties: Iterable[str]) -> dict[str, float]:
        """The seconds of some parties together, by phase."""
        known = [self.seconds.get(name, {}) for name in parties]
        return {phase: sum(each.get(phase, 0.0) for each in known) for phase in (*PHASES, OTHER)}

    def records(self) -> list[dict[str, object]]:
        """A record for each party and phase."""
        return [
            {"party": party, "phase": phase, "seconds": round(seconds, 6), "share": round(share(spent, phase), 6)}
            for party, spent in sorted((party, self.of_all([party])) for party in self.seconds)
            for phase, seconds in spent.items()
            if seconds
        ]

    def bound(self) -> str:
        """What bounds the run, in a sentence."""
        if not self.rounds:
            return "The profile has no round."
        whole = sum(self.rounds.values())
        alone = {who: self.rounds.get((who,), 0.0) / whole for who in _ORDER}
        busy = {who: sum(part for names, part in self.rounds.items() if who in names) / whole for who in _ORDER}
        idle = self.rounds.get((), 0.0) / whole
        works = ", ".join(f"{who} {busy[who]:.0%} ({alone[who]:.0%} alone)" for who in _ORDER)
        most = max(alone, key=lambda who: alone[who])
        bounds = (
            "waiting for messages bounds" if idle > alone[most] else f"{most} {'bound' if most == _SILOS else 'bounds'}"
        )
        return f"At work during the rounds: {works}, no one {idle:.0%}; {bounds} the run."


def _is_silo(party: str) -> bool:
    return party not in (COMMAND, COORDINATOR, EVALUATOR)


def _at_work(found: Sequence[Stretch]) -> dict[tuple[str, ...], float]:
    """Seconds of the rounds by who was at work, see :class:`Profile`; empty without a round."""
    began = min((each.began for each in found if each.phase == "compute"), default=0.0)
    ended = max((each.ended for each in found if each.phase == "merge"), default=0.0)
    changes: list[tuple[float, int, str]] = []
    for each in found:
        if each.phase not in _IDLE and each.party != COMMAND:
            who = _SILOS if _is_silo(each.party) else f"the {each.party}"
            changes += [(each.began, 1, who), (each.ended, -1, who)]
    active, spent = Counter[str](), dict[tuple[str, ...], float]()
    for (at, step, who), (until, *_) in pairwise(sorted(changes)):
        active[who] += step
        if (seconds := min(until, ended) - max(at, began)) > 0:
            names = tuple(each for each in _ORDER if active[each])
            spent[names] = spent.get(names, 0.0) + seconds
    return spent


def share(spent: Mapping[str, float], name: str) -> float:
    """One of some times as a part of their sum."""
    return spent.get(name, 0.0) / (sum(spent.values()) or 1.0)


def speedscope(threads: Sequence[ThreadSpans], name: str) -> dict[str, object]:
    """A file for speedscope: a profile for each thread, on a common time axis."""
    frames: dict[str, int] = {}
    first = min((each.events[0].at for each in threads), default=0.0)
    last = max((each.events[-1].at for each in threads), default=0.0)
    starts: dict[str, list[str]] = {}
    profiles = []
    for each in threads:
        files = starts.setdefault(each.process, [])
        files += [] if each.file in files else [each.file]
        again = f" (start {len(files)})" if len(files) > 1 else ""
        events = [
            {
                "type": event.kind,
                "frame": frames.setdefault(event.name.removeprefix(PARTY), len(frames)),
                "at": round(event.at - first, 6),
            }
            for event in each.events
        ]
        title = f"{each.process}{'' if each.thread == _MAIN else f' {each.thread}'}{again}"
        times = {"unit": "seconds", "startValue": 0, "endValue": round(last - first, 6)}
        profiles.append({"type": "evented", "name": title, **times, "events": events})
    shared = {"frames": [{"name": frame} for frame in frames]}
    about = {"name": name, "exporter": f"fedmq@{__version__}"}
    return {"$schema": _SCHEMA, "shared": shared, "profiles": profiles, **about}


def write(folder: RunFolder) -> Profile:
    """Write ``profile.speedscope.json`` and ``phases.csv`` next to the files of a run's processes.

    Raises:
        InputError: a file cannot be written there.
        DiskError: the disk is full or broken.
    """
    threads = read(folder.profile)
    profile = Profile.of(threads)
    write_bytes(folder.speedscope, json.dumps(speedscope(threads, folder.root.name), separators=(",", ":")).encode())
    write_text(folder.profile / "phases.csv", as_csv(profile.records()))
    return profile
