"""Who is asked to train: how silos are drawn for a merge, and when a silo is on at all."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedmq import seeds
from fedmq.config.parts import Diurnal, Participation
from fedmq.errors import InputError, line_of

_COLUMNS = ["silo", "on", "off"]


def cohort_size(rate: float, eligible: int) -> int:
    """⌊C N⌋ silos (RCSR, algorithm 1), at least one."""
    # The small term keeps floor(0.29 * 100) at 29 in spite of binary fractions.
    return max(1, math.floor(rate * eligible + 1e-9))


def draw_order(seed: int, version: int, silos: Sequence[str], samples: Mapping[str, int]) -> list[str]:
    """Silos in the order in which they are drawn without replacement.

    Every silo draws a number of its own, so one silo's absence does not reshuffle the others.

    Args:
        seed: the scenario's seed.
        version: merges so far.
        silos: whom to draw from.
        samples: weights, by silo: the next one is drawn with probability proportional to its weight among those left
            (exponential keys, Efraimidis and Spirakis 2006). Empty draws all alike.
    """
    numbers = {silo: seeds.derive(seed, "participation", version, silo) for silo in silos}
    if not samples:
        return sorted(silos, key=numbers.__getitem__)
    # The upper 53 of 63 bits: a float in [0, 1) that never rounds to 1.
    return sorted(silos, key=lambda silo: -math.log1p(-(numbers[silo] >> 10) / 2**53) / samples[silo])


@dataclass(frozen=True)
class Sampling:
    """How silos are drawn for a merge.

    Args:
        samples: training samples by silo, the weights of the draw; empty draws all alike.
        candidates: power-of-choice (Cho et al. 2020): so many are drawn, and those of them with the highest last-known
            loss are asked; a silo never heard of counts as infinitely bad. 0 draws twice as many as are asked. None
            asks whoever is drawn.
    """

    samples: Mapping[str, int] = field(default_factory=dict)
    candidates: int | None = None

    def choose(
        self, seed: int, version: int, free: Sequence[str], count: int, losses: Mapping[str, float]
    ) -> tuple[str, ...]:
        """``count`` of the free silos, in the order given."""
        drawn = draw_order(seed, version, free, self.samples)
        if self.candidates is not None:
            drawn = drawn[: max(count, self.candidates or 2 * count)]
            drawn.sort(key=lambda silo: losses.get(silo, math.inf), reverse=True)
        chosen = set(drawn[: max(0, count)])
        return tuple(silo for silo in free if silo in chosen)


def sampling_of(participation: Participation, samples: Mapping[str, int]) -> Sampling:
    """The sampling a scenario asks for.

    Args:
        participation: as in the scenario.
        samples: training samples by silo.
    """
    match participation.kind:
        case "uniform" | "availability":
            return Sampling()
        case "by_data":
            return Sampling(samples)
        case "power_of_choice":
            return Sampling(samples, participation.candidates or 0)


# --------------------------------------------------------------------------------------------------- availability
@dataclass(frozen=True)
class Trace:
    """When each silo is on.

    Args:
        intervals: by silo, (on, off) in the run's time [s], half open; a silo that is not listed is always on.
        period: the trace repeats after so long [s]; infinity never repeats it.
    """

    intervals: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    period: float = math.inf

    def on(self, silo: str, at: float) -> bool:
        """Whether a silo is on at a time [s]."""
        return silo not in self.intervals or any(start <= at < end for start, end in self._near(silo, at))

    def next_change(self, silo: str, at: float) -> float:
        """The first time after ``at`` [s] at which a silo goes on or off; infinity if it never does."""
        now = self.on(silo, at)
        edges = sorted({edge for pair in self._near(silo, at) for edge in pair if edge > at})
        return next((edge for edge in edges if self.on(silo, edge) is not now), math.inf)

    def next_on(self, silo: str, at: float) -> float:
        """The first time from ``at`` [s] on at which a silo is on; infinity if it never is again."""
        return at if self.on(silo, at) else self.next_change(silo, at)

    def outcome_at(self, silo: str, asked: float, due: float, *, wait: bool) -> float:
        """When a task's outcome is known [s]. If the silo is off by then, it is lost; otherwise its reply is here.

        Args:
            silo: who was asked.
            asked: when, being on.
            due: when its reply would be here were it always on.
            wait: whether a silo that is off when its reply is due sends it once it is on again; otherwise going off
                loses the task. One that is never on again loses it in either case.
        """
        back = self.next_on(silo, due)
        if wait and back < math.inf:
            return back
        return min(due, self.next_change(silo, asked))

    def _near(self, silo: str, at: float) -> Iterator[tuple[float, float]]:
        """The silo's intervals around a time. Edges are always computed alike, so they compare equal to themselves."""
        pairs = self.intervals.get(silo, ())
        if self.period == math.inf:
            yield from pairs
            return
        cycle = math.floor(at / self.period)
        for number in range(cycle - 1, cycle + 3):
            shift = number * self.period
            yield from ((shift + start, shift + end) for start, end in pairs)


def diurnal(days: Diurnal, seed: int, silos: Sequence[str]) -> Trace:
    """Every silo is on for the same share of the day, each from an hour of its own, drawn from the seed."""
    if days.share == 1.0:
        return Trace()
    starts = {silo: seeds.numpy_generator(seed, "diurnal", silo).random() * days.period for silo in silos}
    return Trace({silo: ((start, start + days.share * days.period),) for silo, start in starts.items()}, days.period)


def read_trace(path: Path, silos: Sequence[str], period: float = math.inf) -> Trace:
    """Read a trace: CSV with the columns silo, on, off [s].

    Args:
        path: the file.
        silos: the names that may occur; one that does not is always on.
        period: see :class:`Trace`.

    Raises:
        InputError: the file cannot be read, or a line is not as it must be.
    """
    allowed = "a CSV file with the columns silo, on, off"
    try:
        reader = csv.reader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline=""), strict=True)
    except OSError as error:
        raise InputError(str(path), str(error), allowed) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: line {line_of(error)}", error.reason, "UTF-8") from None
    try:
        rows = list(reader)
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}", str(error), allowed) from None
    if not rows or [cell.strip() for cell in rows[0]] != _COLUMNS:
        raise InputError(f"{path}: line 1", ",".join(rows[0]) if rows else "nothing", ",".join(_COLUMNS))
    intervals: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        silo, start, end = _interval(f"{path}: line {number}", row, silos, period)
        own = intervals.setdefault(silo, [])
        if own and start < own[-1][1]:
            raise InputError(f"{path}: line {number}", f"on at {start:g}", f"at or after {own[-1][1]:g}, {silo}'s last")
        own.append((start, end))
    return Trace({silo: tuple(own) for silo, own in intervals.items()}, period)


def _interval(place: str, row: Sequence[str], silos: Sequence[str], period: float) -> tuple[str, float, float]:
    if len(row) != len(_COLUMNS):
        raise InputError(place, ",".join(row), "three values: silo, on, off")
    silo = row[0].strip()
    if silo not in silos:
        raise InputError(place, silo, f"{silos[0]} to {silos[-1]}")
    try:
        start, end = float(row[1]), float(row[2])
    except ValueError:
        raise InputError(place, ",".join(row[1:]), "two numbers of seconds") from None
    if not 0 <= start < end <= period or math.isinf(end):
        limit = "" if math.isinf(period) else f" <= {period:g}, participation.repeat"
        raise InputError(place, ",".join(row[1:]), f"0 <= on < off{limit}")
    return silo, start, end


def trace_of(participation: Participation, seed: int, silos: Sequence[str]) -> Trace:
    """The trace a scenario asks for; all silos always on if it asks for none.

    Raises:
        InputError: the trace's file is not as it must be.
    """
    if participation.trace is not None:
        return read_trace(participation.trace, silos, participation.repeat or math.inf)
    return Trace() if participation.diurnal is None else diurnal(participation.diurnal, seed, silos)
