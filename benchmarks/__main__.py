"""Command line of the benchmarks: ``python -m benchmarks [--only A,B] [--smoke] [--json FILE]``.

The names are those of ``BENCHMARKS``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from benchmarks import blockwise, delta, estimates, hamming, rounds, silos, soak, startup, vit, whole
from benchmarks.measure import Number, Result, load_average, machine


class Benchmark(Protocol):
    """A benchmark's function."""

    def __call__(self, *, smoke: bool) -> Result:
        """Measure; ``smoke``: the smallest size, in seconds, to see that the benchmark works."""


BENCHMARKS: Mapping[str, Benchmark] = {
    "delta": delta.run,
    "rounds": rounds.run,
    "startup": startup.run,
    "hamming": hamming.run,
    "loop": whole.run,
    "vit": vit.run,
    "blockwise": blockwise.run,
    "silos": silos.run,
    "soak": soak.run,
    "estimates": estimates.run,
}
#: Run only if named by ``--only``: they take minutes each.
LONG = ("silos", "soak", "vit", "blockwise", "estimates")


def _names(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in BENCHMARKS:
            raise argparse.ArgumentTypeError(f"found {name}, allowed: {', '.join(BENCHMARKS)}")
    return chosen


def _cell(number: Number) -> str:
    text = f"{number.value:.4g} {number.unit}"
    return text if number.low is None or number.high is None else f"{text} ({number.low:.4g} to {number.high:.4g})"


def _table(result: Result) -> Table:
    table = Table("measured", "median (min to max)", "target", title=result.name, title_justify="left")
    for number in result.numbers:
        table.add_row(number.name, _cell(number), number.aim)
    before, after = result.load
    table.caption = "; ".join((*result.notes, f"load average {before:.1f} before, {after:.1f} after"))
    table.caption_justify = "left"
    return table


def main() -> None:
    """Run the chosen benchmarks; print a table of each, then all results as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure fedmq on this machine.")
    parser.add_argument(
        "--only",
        type=_names,
        metavar="A,B",
        help=f"{', '.join(BENCHMARKS)}; default: all but {', '.join(LONG)}; with --smoke all",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="the smallest sizes: whether the benchmarks work, not how fast fedmq is"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON to this file instead of printing it")
    arguments = parser.parse_args()
    chosen = arguments.only or [name for name in BENCHMARKS if arguments.smoke or name not in LONG]
    console = Console()
    about = machine()
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), highlight=False, soft_wrap=True)
    results: list[dict[str, Any]] = []
    for name in chosen:
        before = load_average()
        result = dataclasses.replace(BENCHMARKS[name](smoke=arguments.smoke), load=(before, load_average()))
        results.append(dataclasses.asdict(result))
        console.print(_table(result))
    text = json.dumps({"machine": about, "benchmarks": results}, indent=1)
    if arguments.json is None:
        print(text)
    else:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
