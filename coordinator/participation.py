"""Which silos are selected: sampling of cohorts, the plan of the rounds, and availability traces."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedmq import seeds
from fedmq.config.sections import Diurnal, Participation
from fedmq.errors import InputError, line_of
from fedmq.storage.regular_files import read_regular

_COLUMNS = ["silo", "on", "off"]


def cohort_size(rate: float, eligible: int) -> int:
    """Number of silos selected in a round: ⌊C N⌋ (RCSR, algorithm 1), at least one, for rate C and N eligible silos."""
    # The small term keeps floor(0.29 * 100) at 29 despite rounding.
    return max(1, math.floor(rate * eligible + 1e-9))


def draw_order(seed: int, version: int, silos: Sequence[str], samples: Mapping[str, int]) -> list[str]:
    """Silos in the order in which they are sampled without replacement.

    Each silo has its own random key, so that the absence of one silo does not change the order of the others. With
    ``samples`` each draw selects one of the remaining silos with probability proportional to its number (exponential
    keys, Efraimidis and Spirakis 2006).
    """
    numbers = {silo: seeds.derive(seed, "participation", version, silo) for silo in silos}
    if not samples:
        return sorted(silos, key=numbers.__getitem__)
    # The upper 53 of 63 bits: a float in [0, 1) that never rounds to 1.
    return sorted(silos, key=lambda silo: -math.log1p(-(numbers[silo] >> 10) / 2**53) / samples[silo])


@dataclass(frozen=True)
class Sampling:
    """How silos are sampled for a round."""

    # Sampling weights: training samples by silo; empty for uniform sampling.
    samples: Mapping[str, int] = field(default_factory=dict)
    # Power-of-choice (Cho et al. 2020): number of candidates drawn, of which those with the highest last-known loss are
    # selected; a silo without a known loss counts as infinite. 0 draws twice the number selected. None selects the
    # silos drawn.
    candidates: int | None = None

    def choose(
        self, seed: int, version: int, free: Sequence[str], count: int, losses: Mapping[str, float]
    ) -> tuple[str, ...]:
        """Select ``count`` of the free silos, in their order; ``losses`` are the last-known training losses."""
        drawn = draw_order(seed, version, free, self.samples)
        if self.candidates is not None:
            drawn = drawn[: max(count, self.candidates or 2 * count)]
            drawn.sort(key=lambda silo: losses.get(silo, math.inf), reverse=True)
        chosen = set(drawn[: max(0, count)])
        return tuple(silo for silo in free if silo in chosen)


def sampling_of(participation: Participation, samples: Mapping[str, int]) -> Sampling:
    """The sampling that a scenario configures."""
    match participation.kind:
        case "uniform" | "availability":
            return Sampling()
        case "by_data":
            return Sampling(samples)
        case "power_of_choice":
            return Sampling(samples, participation.candidates or 0)


@dataclass(frozen=True)
class RoundsPlan:
    """The scenario's options that the rounds machine needs."""

    seed: int
    rounds: int  # number of merges until the run is done
    silos: tuple[str, ...]
    eligible: tuple[str, ...]  # silos that the method can select, in the same order
    participation: float = 1.0  # fraction of the eligible silos selected in a round (the cohort)
    sampling: Sampling = field(default_factory=Sampling)
    # ``sync`` selects a cohort and merges its replies together; ``buffered`` and ``async`` keep as many tasks pending
    # as a cohort has silos, and merge whenever wanted replies have arrived.
    mode: Literal["sync", "buffered", "async"] = "sync"
    quorum: float = 1.0  # sync: fraction of the cohort whose replies suffice once ``patience`` is over
    # Sync: factor by which more silos than the cohort are selected; the first replies, as many as the cohort has silos,
    # are merged.
    over_select: float = 1.0
    buffer: int | None = None  # buffered: replies per merge, at most the cohort; None for a third of the cohort
    patience: float | None = None  # time that a merge waits for more replies [s]; None waits for all
    max_staleness: int | None = None  # replies with a higher staleness are discarded; None accepts all
    first_round_selects_all: bool = False  # sync: the first round selects all eligible silos (pFedMMA)
    # Number of joined silos at which the run starts; the others are selected once they have joined. None waits for all
    # silos.
    minimum: int | None = None
    # Secure aggregation: more than this fraction of the silos that reported must answer each further step of a round;
    # None merges the replies themselves.
    threshold: float | None = None
    affordable: Mapping[str, int] | None = None  # tasks that each silo answers within its budget; None has no limit

    def __post_init__(self) -> None:
        if not self.eligible:
            raise ValueError("the method can select none of the silos")

    def selectable(self, tasks: Mapping[str, int]) -> tuple[str, ...]:
        """The eligible silos whose privacy budget allows another task, by the number of tasks that each was sent."""
        if self.affordable is None:
            return self.eligible
        return tuple(silo for silo in self.eligible if tasks.get(silo, 0) < self.affordable[silo])

    def spent(self, tasks: Mapping[str, int], pending: Mapping[str, object]) -> bool:
        """Whether no further merge is possible, because all silos have spent their privacy budgets."""
        return not self.selectable(tasks) and not (pending and self.mode != "sync")

    def cohort_size(self, version: int) -> int:
        """Number of silos in the cohort at a version."""
        if self.first_round_selects_all and version == 0 and self.mode == "sync":
            return len(self.eligible)
        return cohort_size(self.participation, len(self.eligible))

    def tasks_out(self, version: int) -> int:
        """Number of tasks sent in a round (sync), or pending at any time (buffered, async)."""
        cohort = self.cohort_size(version)
        return math.ceil(self.over_select * cohort - 1e-9) if self.mode == "sync" else cohort

    def wanted(self, version: int) -> int:
        """Number of replies that complete a merge."""
        cohort = self.cohort_size(version)
        match self.mode:
            case "sync":
                return cohort
            case "buffered":
                return min(self.buffer or math.ceil(cohort / 3), cohort)
            case "async":
                return 1

    def enough(self, version: int, have: int, selected: int, *, deadline_passed: bool) -> bool:
        """Whether ``have`` replies suffice for a merge, in mode sync of the silos selected; after the deadline fewer
        do.
        """
        wanted = self.wanted(version)
        if self.mode != "sync":
            return have >= (1 if deadline_passed else wanted)
        expected = min(selected, wanted)
        return have >= max(1, math.ceil(self.quorum * expected - 1e-9) if deadline_passed else expected)


# --------------------------------------------------------------------------------------------------- availability
@dataclass(frozen=True)
class Trace:
    """Availability of the silos over the run's time."""

    # Half-open intervals (on, off) [s] by silo; a silo without an entry is always on.
    intervals: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    period: float = math.inf  # period after which the trace repeats [s]; infinity for no repetition

    def on(self, silo: str, at: float) -> bool:
        """Whether a silo is on at time ``at`` [s]."""
        return silo not in self.intervals or any(start <= at < end for start, end in self._near(silo, at))

    def next_change(self, silo: str, at: float) -> float:
        """The first time after ``at`` [s] at which a silo comes online or goes offline; infinity if it never does."""
        now = self.on(silo, at)
        edges = sorted({edge for pair in self._near(silo, at) for edge in pair if edge > at})
        return next((edge for edge in edges if self.on(silo, edge) is not now), math.inf)

    def next_on(self, silo: str, at: float) -> float:
        """The first time at or after ``at`` [s] at which a silo is on; infinity if it never is."""
        return at if self.on(silo, at) else self.next_change(silo, at)

    def outcome_at(self, silo: str, selected_at: float, due: float, *, wait: bool) -> float:
        """Time at which the outcome of a task is known [s]: its reply arrives if the silo is on then, otherwise it is
        lost.

        With ``wait``, a silo that is off when its reply is due sends it once it is on again; otherwise going off loses
        the task. A silo that is never on again loses the task in either case.
        """
        back = self.next_on(silo, due)
        if wait and back < math.inf:
            return back
        return min(due, self.next_change(silo, selected_at))

    def _near(self, silo: str, at: float) -> Iterator[tuple[float, float]]:
        """The silo's intervals around time ``at``; an edge always has the same floating-point value."""
        pairs = self.intervals.get(silo, ())
        if self.period == math.inf:
            yield from pairs
            return
        cycle = math.floor(at / self.period)
        for number in range(cycle - 1, cycle + 3):
            shift = number * self.period
            yield from ((shift + start, shift + end) for start, end in pairs)


def diurnal(days: Diurnal, seed: int, silos: Sequence[str]) -> Trace:
    """A trace in which each silo is on for the same share of the day, from a start time drawn from the seed."""
    if days.share == 1.0:
        return Trace()
    starts = {silo: seeds.numpy_generator(seed, "diurnal", silo).random() * days.period for silo in silos}
    return Trace({silo: ((start, start + days.share * days.period),) for silo, start in starts.items()}, days.period)


def read_trace(path: Path, silos: Sequence[str], period: float = math.inf) -> Trace:
    """Read a trace from a CSV file with the columns silo, on, off [s]; silos missing in it are always on.

    Raises:
        InputError: the file cannot be read, or a line is invalid.
    """
    allowed = "a CSV file with the columns silo, on, off"
    try:
        text = read_regular(path, allowed).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: line {line_of(error)}", error.reason, "UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
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
        earlier = intervals.setdefault(silo, [])
        if earlier and start < (last_off := earlier[-1][1]):
            allowed = f"at or after {last_off:g}, when {silo} last went off"
            raise InputError(f"{path}: line {number}", f"on at {start:g}", allowed)
        earlier.append((start, end))
    return Trace({silo: tuple(pairs) for silo, pairs in intervals.items()}, period)


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
    """The trace that a scenario configures; without one all silos are always on.

    Raises:
        InputError: the trace's file is invalid.
    """
    if participation.trace is not None:
        return read_trace(participation.trace, silos, participation.repeat or math.inf)
    return Trace() if participation.diurnal is None else diurnal(participation.diurnal, seed, silos)
