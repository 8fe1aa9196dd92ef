"""Damaged files of all kinds that fedmq reads: ``python -m benchmarks.fuzz_files [--files N] [--seed N] [--keep DIR]``.

Data sets, scenarios, site, policy, comparison and tuning files, keys, requests, models, encoders, galleries, heads,
what a run resumes from and the cache: each file is a valid one with random damage. ``benchmarks.fuzz_audit`` does the
same to run folders. A reader may return or raise ``InputError``; any other exception, a reader that takes more than
:data:`HANG_S` of processor time, memory of more than :data:`MEMORY_MB` above that of valid files, and a process that
dies are failures. The same seed makes the same files.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.fuzz_damage import Folder, Special, damaged
from benchmarks.fuzz_kinds import KINDS, valid
from fedmq.errors import InputError
from fedmq.seeds import derive

HANG_S = 2.0
MEMORY_MB = 200
_STEP_S = 0.1
_FILES = 100_000


@dataclass
class Tally:
    """Results of one kind of files.

    Args:
        outcomes: how often files were read, refused, and failed.
        slowest: longest time of a reader [s].
        memory: largest memory above that of valid files [MB].
        failures: number of a file, and how it failed.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    memory: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)


class _TooLong(BaseException):
    """The reader was interrupted; no reader catches it."""


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLong


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def content_of(kind: str, seed: int, number: int) -> dict[str, bytes | Special]:
    """The damaged folder of a number."""
    return damaged(valid(kind), random.Random(derive(seed, "fuzz", kind, number)))


def write(folder: Path, content: Folder) -> None:
    """Write the files of a folder in place of what is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, each in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(each, bytes):
            path.write_bytes(each)
        elif each.what == "folder":
            path.mkdir()
        elif each.what == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(each.target)


def _try_all(line: Connection, kind: str, seed: int, numbers: Sequence[int], folder: Path, given_up_s: float) -> None:
    """Read the damaged files of some numbers in this process; reports each before and after."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGVTALRM, _interrupt)
    os.environ["FEDMQ_CACHE"] = str(folder / "cache")
    place, read = folder / "files", KINDS[kind].read
    for _ in range(3):
        write(place, valid(kind))
        read(place)
    baseline = _peak_mb()
    for number in numbers:
        line.send(number)
        write(place, content_of(kind, seed, number))
        outcome, started = "read", time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, given_up_s)
        try:
            read(place)
        except InputError as error:
            outcome = "refused" if "\n" not in str(error) else "a message of several lines"
        except _TooLong:
            outcome = "hang"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"[:200]
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        line.send((outcome, time.process_time() - started, _peak_mb() - baseline))
    line.send(None)


def fuzz(kind: str, files: int, seed: int, first: int = 0, *, given_up_s: float = 10.0, dead_s: float = 60.0) -> Tally:
    """Read damaged files of one kind, in a process that is replaced if it dies, hangs or grows.

    Args:
        kind: one of :data:`KINDS`.
        files: number of files.
        seed: of the damage.
        first: number of the first file.
        given_up_s: time after which a reader is interrupted [s].
        dead_s: time of sleep after which its process is ended [s].
    """
    tally, done, context = Tally(), first, multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name:
        while done < first + files:
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, kind, seed, range(done, first + files), Path(name), given_up_s)
            process = context.Process(target=_try_all, args=arguments)
            process.start()
            theirs.close()
            number: int | None = None
            try:
                # A new process first loads libraries, and reads the valid file.
                while (number := _received(ours, process.pid, dead_s * (10 if number is None else 1))) is not None:
                    done = number + 1
                    outcome, seconds, memory = _received(ours, process.pid, dead_s)
                    _count(tally, number, outcome, seconds, memory)
                    if memory > MEMORY_MB:
                        break  # the peak never falls
            except TimeoutError:
                if number is None:
                    process.kill()
                    raise RuntimeError(f"{kind}: the valid file was not read in {10 * dead_s:g} s") from None
                _count(tally, done - 1, f"nothing for {dead_s:g} s", 0.0, 0.0)
            except EOFError:
                process.join()
                if number is None:
                    raise RuntimeError(f"{kind}: the valid file was not read") from None
                _count(tally, done - 1, f"the process died with {process.exitcode}", 0.0, 0.0)
            process.kill()
            process.join()
            ours.close()
    return tally


def _received(line: Connection, pid: int | None, dead_s: float) -> Any:
    """The next message of a process; one that waits for ever, as for a pipe, sleeps, whatever else the machine does."""
    process, asleep = psutil.Process(pid), 0.0
    while not line.poll(_STEP_S):
        asleep = asleep + _STEP_S if process.status() == psutil.STATUS_SLEEPING else 0.0
        if asleep >= dead_s:
            raise TimeoutError
    return line.recv()


def _count(tally: Tally, number: int, outcome: str, seconds: float, memory: float) -> None:
    tally.slowest, tally.memory = max(tally.slowest, seconds), max(tally.memory, memory)
    problems = [] if outcome in ("read", "refused") else [outcome]
    problems += [f"{seconds:.1f} s"] if seconds > HANG_S else []
    problems += [f"{memory:.0f} MB above valid files"] if memory > MEMORY_MB else []
    tally.outcomes["failed" if problems else outcome] += 1
    if problems:
        tally.failures.append((number, ", ".join(problems)))


def _known(record: Path | None) -> dict[str, dict[str, Any]]:
    """The kinds that an interrupted call has finished."""
    return dict(json.loads(record.read_text())) if record is not None and record.exists() else {}


def main() -> None:
    """Fuzz every kind, print what was found, and exit with 1 if a file failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_files", description=__doc__)
    parser.add_argument("--files", type=int, default=_FILES, help=f"number of files of all kinds; default {_FILES}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="comma-separated kinds; default all")
    parser.add_argument("--first", type=int, default=0, help="number of the first file of each kind")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write files that failed to this folder")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="remember finished kinds here, and leave them out")
    parser.add_argument("--smoke", action="store_true", help="three files of each kind")
    options = parser.parse_args()
    kinds = options.only.split(",") if options.only else list(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--only: found {unknown[0]!r}, allowed: {', '.join(KINDS)}")
    torch.set_num_threads(1)  # the threads of a process that is forked are missing in the new one, which waits for them
    console, started = Console(width=120), time.perf_counter()
    table = Table("kind", "files", "read", "refused", "failed", "slowest s", "MB above valid files")
    failed, each, finished = 0, 3 if options.smoke else -(-options.files // len(kinds)), _known(options.resume)
    for kind in kinds:
        if kind in finished:
            tally = Tally(**{**finished[kind], "outcomes": Counter(finished[kind]["outcomes"])})
        else:
            tally = fuzz(kind, each, options.seed, options.first)
        finished[kind] = vars(tally) | {"outcomes": dict(tally.outcomes)}
        if options.resume is not None:
            options.resume.write_text(json.dumps(finished))
        _row(table, kind, tally)
        failed += len(tally.failures)
        console.print(f"{time.perf_counter() - started:.0f} s: {kind}, {dict(tally.outcomes)}", highlight=False)
        for number, problem in tally.failures[:5]:
            console.print(f"  {kind} {number}: {problem}", highlight=False, markup=False, soft_wrap=True)
        if options.keep is not None:
            for number, _ in tally.failures:
                write(options.keep / f"{kind}-{number}".replace(" ", "_"), content_of(kind, options.seed, number))
    console.print(table)
    console.print(f"seed {options.seed}, {time.perf_counter() - started:.0f} s, {failed} failures")
    sys.exit(bool(failed))


def _row(table: Table, kind: str, tally: Tally) -> None:
    counts = [str(tally.outcomes[name]) for name in ("read", "refused", "failed")]
    table.add_row(kind, str(sum(tally.outcomes.values())), *counts, f"{tally.slowest:.2f}", f"{tally.memory:.0f}")


if __name__ == "__main__":
    main()
