"""Command line of the benchmarks: ``python -m benchmarks [--only A,B] [--smoke] [--minutes M] [--json FILE]``.

The names are those of ``BENCHMARKS``. Results are kept in ``bench/``, a JSON file for each call.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Number, Result, machine, minutes
from benchmarks.registry import BENCHMARKS, run_limited


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
    took = f"{result.seconds:.0f} s, load average {before:.1f} before, {after:.1f} after"
    table.caption = "; ".join((*result.notes, took))
    table.caption_justify = "left"
    return table


def main() -> None:
    """Run the chosen benchmarks one after the other; print a table of each, keep all results as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure fedmq on this machine.")
    parser.add_argument(
        "--only",
        type=_names,
        metavar="A,B",
        help=f"of {', '.join(BENCHMARKS)}; default: all but sums and peers, which needs Flower (make peers)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="the smallest sizes: whether the benchmarks work, not how fast fedmq is"
    )
    parser.add_argument(
        "--minutes", type=minutes, default=10.0, metavar="M", help="time limit of all together, beside their own"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results; default: a new one in bench/")
    arguments = parser.parse_args()
    # As an exception, at which the benchmark that runs is killed with its processes, as at Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A file or a pipe has no width of its own; 80 columns would break the names of what was measured.
    console = Console(width=None if sys.stdout.isatty() else 130)
    about, until = machine(), time.monotonic() + 60 * arguments.minutes
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), highlight=False, soft_wrap=True)
    results: list[Result] = []
    file = arguments.json or _new_file(about["commit"])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in arguments.only or [name for name in BENCHMARKS if BENCHMARKS[name].by_default]:
            limit_s = min(BENCHMARKS[name].limit_s, until - time.monotonic())
            if limit_s > 0:
                with console.status(f"{name}, at most {limit_s:.0f} s"):
                    result = run_limited(name, arguments.smoke, limit_s, Path(folder) / f"{name}.json")
            else:
                result = Result(
                    name, (), failed=f"not started, as the limit of {arguments.minutes:g} minutes was reached"
                )
            results.append(result)
            console.print(f"{name}: {result.failed}" if result.failed else _table(result))
            _keep(file, about, results)  # also if the next one is interrupted
    console.print(f"results: {file}", soft_wrap=True)
    sys.exit(any(result.failed for result in results))


def _keep(file: Path, about: Mapping[str, object], results: list[Result]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": about, "benchmarks": [asdict(result) for result in results]}, indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def _new_file(commit: str) -> Path:
    return Path("bench") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{commit}.json"


if __name__ == "__main__":
    main()
