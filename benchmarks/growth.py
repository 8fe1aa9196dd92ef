"""Cost of a run against its size: time per round, memory and start over silos, size of the model, and items.

Usage: ``python -m benchmarks.growth [--out FOLDER] [--axes silos,model,items] [--minutes 30] [--smoke]``. It prints a
table and one sentence on what bends first, and writes ``growth.html`` with a plot per axis and ``growth.json``. It
continues from the ``growth.json`` of an earlier call. ``--smoke`` measures only the two smallest sizes of each axis.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.measure import commit, load_average, machine, minutes
from benchmarks.runs import Roster, loop_seconds, peak_memory, roster_scenario, simulated
from fedmq.runs.report.html import Figure, colour, document

#: A cost grows faster than its axis where it is, per unit of size, more than this many times its minimum on the axis.
BEND = 1.5
#: What is measured: attribute of a point, name, unit.
COSTS = (("round_s", "time per round", "s"), ("memory_mb", "memory of all processes", "MB"), ("start_s", "start", "s"))
#: The run whose size is varied.
_BASE = Roster(silos=10, items=200, width=64, rounds=3, selected=10)


def _silos(count: float) -> Roster:
    return replace(_BASE, silos=int(count), items=20 * int(count), selected=int(count))


def _model(megabytes: float) -> Roster:
    """Two silos whose adapters (64 wide) and heads on features of width w have 4 w^2 + 256 w float32 values."""
    width = (math.sqrt(256**2 + 16 * megabytes * 1e6 / 4) - 256) / 8
    return replace(_BASE, silos=2, items=40, selected=2, width=round(width), missing=0.0)


def _items(count: float) -> Roster:
    return replace(_BASE, items=int(count))


@dataclass(frozen=True)
class Axis:
    """What is varied."""

    title: str
    unit: str  # of its sizes
    sizes: tuple[float, ...]  # ascending
    roster: Callable[[float], Roster]  # the run of a size


AXES: Mapping[str, Axis] = {
    "silos": Axis("the number of silos", "silos", (10, 30, 100, 300, 1000), _silos),
    "model": Axis("the size of the model", "MB", (1, 3, 10, 30, 100, 200), _model),
    "items": Axis("the number of items", "items", (1e3, 1e4, 1e5, 1e6), _items),
}


@dataclass(frozen=True)
class Point:
    """Cost of a run of one size."""

    size: float  # in the unit of its axis
    round_s: float  # time per round [s]
    memory_mb: float  # peak memory of all processes [MB PSS]
    start_s: float  # from the command until all silos were ready, features and partition not in the cache [s]
    sent_mb: float  # models sent per merged task [MB]: the size of the model, and more if tasks were sent again
    load: float = 0.0  # one-minute load average of the machine at the end; four processes at work make 4
    commit: str = ""


@dataclass(frozen=True)
class Limits:
    """When an axis ends before its largest size."""

    until: float  # end of all measurements [s, monotonic]
    memory_mb: float  # most memory that a run may be expected to take [MB]

    def refusal(self, points: Sequence[Point], size: float, rounds: int) -> str:
        """Why a run is not started whose cost continues the line through the last two points; empty if it is."""
        if len(points) < 2:
            return ""
        before, last = points[-2:]
        steps = (size - last.size) / (last.size - before.size)
        memory_mb = last.memory_mb + steps * (last.memory_mb - before.memory_mb)
        now, earlier = (each.start_s + rounds * each.round_s for each in (last, before))
        left = self.until - time.monotonic()
        if memory_mb > self.memory_mb:
            return f"it could take {memory_mb:,.0f} MB, and {self.memory_mb:,.0f} MB are the limit"
        if (expected := now + steps * (now - earlier)) > left:
            return f"it could take {expected:.0f} s, and {left:.0f} s are left"
        return ""


@dataclass
class Series:
    """What was measured along an axis."""

    points: list[Point] = field(default_factory=list)  # ascending by size
    missing: str = ""  # why they end before the largest size; empty if they do not

    def go_on(self, name: str, sizes: Sequence[float], limits: Limits) -> Iterator[str]:
        """Measure the axis of this name from its smallest size without a point, to its largest size or a limit.

        Yields a line before and after each size.
        """
        for size in sizes[len(self.points) :]:
            what, roster = f"{name}: {size:,.0f} {AXES[name].unit}", AXES[name].roster(size)
            why = limits.refusal(self.points, size, roster.rounds)
            if not why:
                yield f"{what} ..."
                try:
                    point = measured(roster, size, limits.until - time.monotonic())
                except subprocess.TimeoutExpired:
                    why = "the time for all measurements was over"
            if why:
                self.missing = f"{what} not measured, as {why}"
                return
            self.points.append(point)
            costs = ", ".join(f"{label} {getattr(point, cost):.4g} {unit}" for cost, label, unit in COSTS)
            yield f"{what}: {costs}, load average {point.load:.1f}"
        self.missing = ""


def measured(roster: Roster, size: float, limit_s: float) -> Point:
    """Run a roster in at most four host processes and return its cost.

    Raises:
        subprocess.SubprocessError: the run failed or took longer than the limit.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        scenario = roster_scenario(folder, roster)
        settings = (f"silos.hosts={min(4, roster.silos)}", "training.batch_size=128")
        with peak_memory() as peak:
            summary = simulated(scenario, folder / "run", *settings, limit_s=max(limit_s, 1.0))
        return Point(
            size,
            loop_seconds(folder / "run") / roster.rounds,
            peak[0],
            summary["seconds"]["startup"],
            summary["bytes"]["down"]["model"] / summary["tasks"]["merged"] / 1e6,
            load_average(),
            commit(),
        )


def rises(points: Sequence[Point], cost: str) -> Iterator[tuple[float, Point, Point]]:
    """For each point its cost per unit as a multiple of the least before it, the point of that least, and the point."""
    for number, point in enumerate(points[1:], 1):
        cheapest = min(points[:number], key=lambda each: _per_unit(each, cost))
        yield _per_unit(point, cost) / _per_unit(cheapest, cost), cheapest, point


def _per_unit(point: Point, cost: str) -> float:
    return float(getattr(point, cost)) / point.size


def what_bends_first(growth: Mapping[str, Series]) -> str:
    """One sentence: the cost that bends at the smallest multiple of its axis's smallest size, or what is closest."""
    costs = [
        (times, high.size / series.points[0].size, axis, name, unit, cost, low, high)
        for axis, series in growth.items()
        for cost, name, unit in COSTS
        for times, low, high in rises(series.points, cost)
    ]
    if not costs:
        return "Nothing bends: no axis has two sizes."
    bent = [each for each in costs if each[0] > BEND]
    times, _, axis, name, unit, cost, low, high = (
        min(bent, key=lambda each: each[1]) if bent else max(costs, key=lambda each: each[0])
    )
    sizes = AXES[axis].unit
    nothing = f"Nothing bends: nowhere does a unit of size cost more than {BEND} times the least on its axis. "
    return (
        f"{'' if bent else nothing}The {name} over {AXES[axis].title} {'bends first' if bent else 'comes closest'}: at "
        f"{high.size:,.0f} {sizes} it is {_per_unit(high, cost):.3g} {unit} per unit, {times:.1f} times that at "
        f"{low.size:,.0f} ({_per_unit(low, cost):.3g} {unit})."
    )


def figure(axis: str, points: Sequence[Point]) -> Figure:
    """The costs of an axis as multiples of those of its smallest size, on logarithmic scales."""
    unit = AXES[axis].unit
    note = f"Dotted: in proportion to size. A cost that grows faster than this line costs more per {unit}."
    drawn = Figure(
        f"Cost over {AXES[axis].title}",
        f"{AXES[axis].title} [{unit}]",
        "cost as a multiple of the smallest size's",
        note=note,
    )
    sizes = [point.size for point in points]
    for place, (cost, name, of) in enumerate(COSTS):
        values = [float(getattr(point, cost)) for point in points]
        text = [f"{name}: {value:,.4g} {of}" for value in values]
        times = [value / values[0] for value in values]
        line = {"color": colour(place)}
        drawn.draw("scatter", x=sizes, y=times, name=name, text=text, hoverinfo="text", mode="lines+markers", line=line)
    straight = {"color": "#9aa7b4", "dash": "dot"}
    times = [size / sizes[0] for size in sizes]
    drawn.draw("scatter", x=sizes, y=times, name="in proportion", mode="lines", line=straight)
    drawn.x["type"] = drawn.y["type"] = "log"
    return drawn


def rows(growth: Mapping[str, Series]) -> list[list[str]]:
    """The table of all points, its head first."""
    costs = [f"{name} [{unit}]" for _, name, unit in COSTS]
    table = [["axis", "size", *costs, "per unit, relative to the axis's minimum", "load", "commit"]]
    for axis, series in growth.items():
        for point in series.points:
            least = [min(_per_unit(each, cost) for each in series.points) for cost, _, _ in COSTS]
            times = [_per_unit(point, cost) / best for (cost, _, _), best in zip(COSTS, least, strict=True)]
            values = [f"{getattr(point, cost):,.4g}" for cost, _, _ in COSTS]
            shares = ", ".join(f"{x:.2g}x" for x in times)
            size = f"{point.size:,.0f} {AXES[axis].unit}"
            table.append([axis, size, *values, shares, f"{point.load:.1f}", point.commit])
    return table


def written(growth: Mapping[str, Series], folder: Path) -> list[str]:
    """Write the page and the JSON; returns what both say: what bends first, and which sizes are missing."""
    about: dict[str, Any] = machine()
    said = [what_bends_first(growth), *(series.missing for series in growth.values() if series.missing)]
    notes = (*said, ", ".join(f"{key} {value}" for key, value in about.items()))
    figures = [figure(axis, series.points) for axis, series in growth.items() if series.points]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.html").write_text(document("Cost against size", notes, figures, rows(growth)), encoding="utf-8")
    found = {"machine": about, "axes": {axis: asdict(series) for axis, series in growth.items()}, "said": said}
    (folder / "growth.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return said


def earlier(folder: Path) -> dict[str, Series]:
    """What an earlier call measured, of ``growth.json``; empty without one."""
    with suppress(FileNotFoundError):
        found = json.loads((folder / "growth.json").read_text(encoding="utf-8"))
        return TypeAdapter(dict[str, Series]).validate_python(found["axes"])
    return {}


def _axes(text: str) -> list[str]:
    for name in text.split(","):
        if name not in AXES:
            raise argparse.ArgumentTypeError(f"found {name}, allowed: {', '.join(AXES)}")
    return text.split(",")


def main() -> None:
    """Measure the axes, print the table and what follows from it, write the page after each size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench/growth"),
        metavar="FOLDER",
        help="default: bench/growth; what an earlier call measured there is not measured again",
    )
    parser.add_argument("--axes", type=_axes, default=list(AXES), metavar="A,B", help=f"of {', '.join(AXES)}")
    parser.add_argument("--minutes", type=minutes, default=30.0, help="time limit of all together (default 30)")
    parser.add_argument("--smoke", action="store_true", help="only the two smallest sizes of each axis")
    arguments = parser.parse_args()
    growth = earlier(arguments.out)
    console = Console(width=None if sys.stdout.isatty() else 130)
    # Half of what is free: a run that grows faster than its size has room before the machine has none.
    memory_mb = psutil.virtual_memory().available / 2**21
    limits = Limits(time.monotonic() + 60 * arguments.minutes, memory_mb)
    for name in arguments.axes:
        series = growth.setdefault(name, Series())
        for line in series.go_on(name, AXES[name].sizes[: 2 if arguments.smoke else None], limits):
            console.print(line, soft_wrap=True)
            written(growth, arguments.out)
    said = written(growth, arguments.out)
    head, *body = rows(growth)
    table = Table(*map(escape, head))  # units are in brackets, like markup
    for row in body:
        table.add_row(*map(escape, row))
    console.print(table)
    console.print(*said, f"plots: {arguments.out / 'growth.html'}", sep="\n", soft_wrap=True)


if __name__ == "__main__":
    main()
