"""Damaged files and frames of every kind that fedmq reads: ``python -m benchmarks.fuzz [--examples N] [KIND...]``.

Hypothesis draws them from the strategies that the tests use with fewer examples: data sets, scenarios, site, policy,
comparison and tuning files, keys, models, encoders, galleries, run folders, what a run resumes from, the cache, frames,
and exchanges with a coordinator's end. A reader may return or refuse its input with its own kind of error. Any other
exception, more than :data:`SLOWEST_S` of processor time, memory of more than :data:`MEMORY_MB` above that before, a
process that dies and one that waits for ever are failures. The same seed makes the same examples.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from tests.damaged_files import Folder, Kind, folders, read_damaged, valid, write
from tests.damaged_frames import READERS, frames, read_frame
from tests.file_kinds import KINDS
from tests.roster_senders import exchanged

#: Limits of an example: processor time, and that after which it is interrupted [s], and memory [MB].
SLOWEST_S, GIVEN_UP_S, MEMORY_MB = 2.0, 10.0, 200.0
#: Time of sleep after which a process is ended, and that between two looks at it [s].
_DEAD_S, _STEP_S = 60.0, 0.1
_EXAMPLES = 1000


@dataclass(frozen=True)
class Campaign:
    """Examples of one kind.

    Args:
        examples: their strategy.
        check: checks one; given a folder for its files. Returns how often it had which outcomes.
        begin: loads what the first example would load, given the same folder.
    """

    examples: st.SearchStrategy[Any]
    check: Callable[[Any, Path], Counter[str]]
    begin: Callable[[Path], object] = lambda _: None


@dataclass
class Tally:
    """Results of one kind."""

    outcomes: Counter[str] = field(default_factory=Counter)  # how often each outcome occurred
    slowest: float = 0.0  # longest processor time of an example [s]
    memory: float = 0.0  # largest memory above that before an example [MB]
    failure: str = ""  # how an example failed; empty if none did


def campaign_of(kind: Kind) -> Campaign:
    """Damaged files of a kind."""

    def check(content: Folder, place: Path) -> Counter[str]:
        return Counter([read_damaged(kind, content, place / "files")])

    def begin(place: Path) -> None:
        for _ in range(2):
            write(place / "files", valid(kind))
            kind.read(place / "files")  # as all valid files, it is not refused

    return Campaign(folders(kind), check, begin)


CAMPAIGNS: Mapping[str, Campaign] = {
    **{name: campaign_of(kind) for name, kind in KINDS.items()},
    **{f"{name} frame": Campaign(frames(name), lambda read, _: Counter([read_frame(read)])) for name in READERS},
    "exchange": Campaign(st.integers(0, 2**62), lambda number, _: exchanged(random.Random(number))),
}


class _TooLong(BaseException):
    """An example was interrupted; no reader catches it."""


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLong


def _memory_mb(key: str) -> float:
    """A size of this process: ``VmHWM``, the most since the last reset, or ``VmRSS``, now."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


@contextmanager
def bounded(tally: Tally) -> Iterator[None]:
    """Interrupt the block if it does not end, and fail if it took too much time or memory.

    Raises:
        AssertionError: see above.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    before, began = _memory_mb("VmRSS"), time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, GIVEN_UP_S)
    try:
        yield
    except _TooLong:
        raise AssertionError(f"a hang: interrupted after {GIVEN_UP_S:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        seconds, memory = time.process_time() - began, _memory_mb("VmHWM") - before
        tally.slowest, tally.memory = max(tally.slowest, seconds), max(tally.memory, memory)
    assert seconds <= SLOWEST_S, f"{seconds:.1f} s"
    assert memory <= MEMORY_MB, f"{memory:.0f} MB more than before"


def _try_all(
    line: Connection, campaign: Campaign, examples: int, seed: int, phases: tuple[Phase, ...], keep: Path | None
) -> None:
    """Check examples in this process; gives a sign of life before each, and sends the tally."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGVTALRM, _interrupt)
    torch.set_num_threads(1)
    tempfile.tempdir = str(Path(os.environ["FEDMQ_CACHE"]).parent)  # removed with what a killed process leaves there
    tally, place, last = Tally(), Path(os.environ["FEDMQ_CACHE"]).parent, dict[str, Any]()

    @seeded(seed)
    @settings(
        max_examples=examples, database=None, deadline=None, phases=phases, suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet, report_multiple_bugs=False,
    )  # fmt: skip
    @given(campaign.examples)
    def check(example: Any) -> None:
        line.send(None)
        last["example"] = example
        with bounded(tally):
            tally.outcomes.update(campaign.check(example, place))

    try:
        campaign.begin(place)
        check()
    except BaseException as error:
        tally.failure = "".join(traceback.format_exception(error))
        if keep is not None and isinstance(last.get("example"), Mapping):
            write(keep, last["example"])  # Hypothesis ends with the smallest one
    line.send(tally)


def fuzz(
    campaign: Campaign,
    examples: int,
    seed: int = 0,
    *,
    phases: tuple[Phase, ...] = (Phase.generate,),
    keep: Path | None = None,
    dead_s: float = _DEAD_S,
) -> Tally:
    """Check examples of one kind in a new process, which may hang or die.

    Args:
        campaign: the kind.
        examples: number of examples.
        seed: of the examples.
        phases: with ``Phase.shrink``, a failure is that of a small example.
        keep: folder for the files of an example that failed; None keeps none.
        dead_s: time of sleep after which the process is ended [s].
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_try_all, args=(theirs, campaign, examples, seed, phases, keep))
        before = os.environ.get("FEDMQ_CACHE")
        os.environ["FEDMQ_CACHE"] = f"{name}/cache"
        try:
            process.start()
        finally:
            os.environ.pop("FEDMQ_CACHE") if before is None else os.environ.update(FEDMQ_CACHE=before)
        theirs.close()
        try:
            tally = _received(ours, process.pid, dead_s)
        finally:
            process.kill()
            process.join()
            ours.close()
    return tally


def _received(line: Connection, pid: int | None, dead_s: float) -> Tally:
    """The tally of a process; one that waits for ever, as for a pipe, sleeps, whatever else the machine does."""
    process, begun, asleep = psutil.Process(pid), 0, 0.0
    while True:
        if not line.poll(_STEP_S):
            asleep = asleep + _STEP_S if process.status() == psutil.STATUS_SLEEPING else 0.0
            # Before the first example, the process loads libraries and makes the valid files.
            if asleep >= (dead_s if begun else 10 * dead_s):
                return Tally(failure=f"nothing for {dead_s:g} s after {begun} examples")
            continue
        asleep = 0.0
        try:
            received = line.recv()
        except EOFError:
            return Tally(failure=f"the process died after {begun} examples")
        if isinstance(received, Tally):
            return received
        begun += 1


def _row(name: str, tally: Tally) -> Sequence[str]:
    outcomes = ", ".join(f"{what} {count:,}" for what, count in tally.outcomes.most_common(4))
    return name, outcomes, f"{tally.slowest:.2f}", f"{tally.memory:.0f}", "failed" if tally.failure else ""


def main() -> None:
    """Check examples of the chosen kinds, print what was found, and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="default: all; --list prints them")
    parser.add_argument("--examples", type=int, default=_EXAMPLES, help=f"of each kind; default {_EXAMPLES}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="write the files of examples that failed to this folder"
    )
    parser.add_argument("--list", action="store_true", help="print the kinds")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CAMPAIGNS))
        return
    kinds = options.kinds or list(CAMPAIGNS)
    if unknown := [kind for kind in kinds if kind not in CAMPAIGNS]:
        parser.error(f"found {unknown[0]!r}, allowed: {', '.join(CAMPAIGNS)}")
    torch.set_num_threads(1)  # the threads of a process that is forked are missing in the new one, which waits for them
    console, failed = Console(width=120), 0
    table = Table("kind", "outcomes", "slowest s", "MB", "")
    for name in kinds:
        keep = None if options.keep is None else options.keep / name.replace(" ", "_")
        phases = (Phase.generate, Phase.shrink)
        tally = fuzz(CAMPAIGNS[name], options.examples, options.seed, phases=phases, keep=keep)
        table.add_row(*_row(name, tally))
        console.print(*_row(name, tally), highlight=False, markup=False)
        if tally.failure:
            failed += 1
            console.print(tally.failure, highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    console.print(f"seed {options.seed}, {options.examples} examples of each kind, {failed} kinds failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
