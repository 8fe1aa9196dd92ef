"""Execute runs in child processes, several in parallel, and stop them cleanly."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fedmq.clock import Clock, WallClock

#: Maximum interval between two looks at what the runs have written [s].
_POLL_SECONDS = 0.2
_REPORT_SECONDS = 1.0
#: Time [s] for a stopped run to write its last checkpoint and end its silos.
_STOP_PATIENCE = 60.0


@dataclass(frozen=True)
class Job:
    """One run to execute."""

    name: str  # shown while it runs and when it fails
    words: tuple[str, ...]  # arguments of ``fedmq``
    log: Path  # file for its standard error
    metrics: Path  # the run's ``metrics.jsonl``, from which its progress is read
    rounds: int  # number of merges of the run


Start = Callable[[Job], BaseProcess]
"""Starts the process of a job, which ends with its exit code, and receives SIGTERM if this process dies."""


@dataclass(frozen=True)
class JobProgress:
    """Progress of the runs."""

    done: int  # number of runs that ended
    total: int  # number of runs
    running: tuple[tuple[str, float], ...]  # name and finished fraction of each running run
    # Estimated time until all are done [s]; None without progress so far, or with nothing left to do.
    left: float | None


@dataclass(frozen=True)
class Ended:
    """Result of executing runs."""

    errors: Mapping[str, str]  # one line for each failed run, by name
    stopped: bool


def run_all(
    jobs: Sequence[Job],
    at_once: int,
    report: Callable[[JobProgress], None],
    stop_wanted: Callable[[], bool],
    start: Start,
    *,
    useless: Callable[[], Collection[str]] = tuple,
    clock: Clock | None = None,
) -> Ended:
    """Execute jobs in order, several in parallel; a failure does not affect the others."""
    clock = clock or WallClock()
    waiting, running, errors = deque(jobs), dict[Job, BaseProcess](), dict[str, str]()
    initial, ended, reported, signalled = dict[Job, float](), 0, -_REPORT_SECONDS, set[Job]()
    try:
        while waiting or running:
            if stop_wanted():
                end(running.values())
                return Ended(errors, stopped=True)
            without = useless()
            for job in [job for job in running if job.name in without and job not in signalled]:
                signalled.add(job)
                running[job].terminate()  # a second signal would abort it
            while waiting and len(running) < at_once:
                job = waiting.popleft()
                initial[job] = fraction(job)
                if job.name in without:
                    ended += 1
                else:
                    running[job] = start(job)
            over = [job for job, process in running.items() if process.exitcode is not None]
            for job in over:
                code = running.pop(job).exitcode
                ended += 1
                if code and job not in signalled:
                    errors[job.name] = error_line(job.log, code)
            if over or clock.now() - reported >= _REPORT_SECONDS:
                reported = clock.now()
                report(_progress(len(jobs), ended, initial, running, reported))
            if not over:
                wait([process.sentinel for process in running.values()], _POLL_SECONDS)
    finally:
        for process in running.values():
            process.kill()
            process.join()
    return Ended(errors, stopped=False)


def _progress(
    total: int, ended: int, initial: Mapping[Job, float], running: Collection[Job], now: float
) -> JobProgress:
    """The progress of jobs, with the remaining time estimated from the fractions that were done here."""
    fractions = {job: fraction(job) for job in running}
    before = sum(initial[job] for job in initial)
    here = ended + sum(fractions.values()) - before
    left = now * (total - ended - sum(fractions.values())) / here if here > 0 and ended < total else None
    return JobProgress(ended, total, tuple((job.name, done) for job, done in fractions.items()), left)


def end(running: Collection[BaseProcess]) -> None:
    """Tell runs to stop after their current merge; kill those that take too long."""
    for process in running:
        process.terminate()
    clock = WallClock()
    for process in running:
        process.join(max(0.1, _STOP_PATIENCE - clock.now()))
        if process.exitcode is None:
            process.kill()


def fraction(job: Job) -> float:
    """Fraction of a run's merges in its ``metrics.jsonl``."""
    try:
        return min(1.0, job.metrics.read_bytes().count(b'"kind": "merge"') / job.rounds)
    except OSError:
        return 0.0


def error_line(log: Path, code: int) -> str:
    """The error line of a failed program."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("fedmq: ")]
    if errors or lines:
        return (errors or lines)[-1].removeprefix("fedmq: ")
    return f"ended with exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
