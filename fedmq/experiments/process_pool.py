"""Runs in processes of their own, several at once: started, watched, stopped cleanly, never outliving their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmq.clock import WallClock

_POLL_SECONDS = 0.2
_REPORT_SECONDS = 1.0
#: A stopped run writes its last checkpoint and ends its silos; this is more than that takes.
_STOP_PATIENCE = 60.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """One run to be done.

    Args:
        name: shown while it runs and when it fails.
        command: the program and its arguments.
        log: file for what it says on standard error.
        metrics: the run's ``metrics.jsonl``, to see how far it is.
        rounds: merges the run will make.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    metrics: Path
    rounds: int


@dataclass(frozen=True)
class JobProgress:
    """How the runs stand.

    Args:
        done: runs that ended.
        total: runs there are.
        running: name and finished share of each run under way.
        left: seconds until all are done at the pace so far; None while there is none yet, or nothing to do.
    """

    done: int
    total: int
    running: tuple[tuple[str, float], ...]
    left: float | None


@dataclass(frozen=True)
class Ended:
    """What became of the runs.

    Args:
        errors: one line for each run that failed, by name.
        stopped: whether somebody stopped them before all were done.
    """

    errors: Mapping[str, str]
    stopped: bool


def run_all(
    jobs: Sequence[Job],
    at_once: int,
    told: Callable[[JobProgress], None],
    stop_wanted: Callable[[], bool],
) -> Ended:
    """Run jobs in order, so many at once; one that fails does not hold up the others.

    Args:
        jobs: with different names.
        at_once: at least 1.
        told: how things stand, about once a second and after each run.
        stop_wanted: once true, nothing is started any more and what runs is asked to stop.
    """
    clock = WallClock()
    waiting, running, errors = deque(jobs), dict[Job, subprocess.Popen[bytes]](), dict[str, str]()
    begun, ended, reported, stopped = dict[Job, float](), 0, -_REPORT_SECONDS, False
    try:
        while (waiting and not stopped) or running:
            if stop_wanted() and not stopped:
                stopped = True
                _end(running.values())
            while waiting and len(running) < at_once and not stopped:
                job = waiting.popleft()
                begun[job] = _share(job)
                running[job] = _start(job)
            over = [job for job, process in running.items() if process.poll() is not None]
            for job in over:
                code = running.pop(job).returncode
                ended += 1
                if code and not stopped:
                    errors[job.name] = _error_line(job.log, code)
            if not stopped and (over or clock.now() - reported >= _REPORT_SECONDS):
                reported = clock.now()
                shares = {job: _share(job) for job in running}
                done = ended - sum(begun[job] for job in begun if job not in running)
                done_here = done + sum(shares[job] - begun[job] for job in running)
                left = (
                    reported * (len(jobs) - ended - sum(shares.values())) / done_here
                    if done_here > 0 and ended < len(jobs)
                    else None
                )
                told(JobProgress(ended, len(jobs), tuple((job.name, share) for job, share in shares.items()), left))
            if not over:
                time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return Ended(errors, stopped)


def _start(job: Job) -> subprocess.Popen[bytes]:
    """Start a run away from the terminal's Ctrl-C, which is for its parent to pass on."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()
    with job.log.open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - our own program
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            # One thread each: runs share the cores, and a run's own processes never use more.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: _die_with(parent),  # noqa: PLW1509 - no thread of ours holds a lock here
        )


def _die_with(parent: int) -> None:
    """In a child before it becomes its program: be asked to stop when the parent is gone, however it went (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


def _end(running: Collection[subprocess.Popen[bytes]]) -> None:
    """Ask runs to stop after the merge they are at, and give them the time for it."""
    for process in running:
        process.terminate()
    clock = WallClock()
    for process in running:
        try:
            process.wait(max(0.1, _STOP_PATIENCE - clock.now()))
        except subprocess.TimeoutExpired:
            process.kill()


def _share(job: Job) -> float:
    """Share of a run's merges that are on file."""
    try:
        return min(1.0, job.metrics.read_bytes().count(b'"kind": "merge"') / job.rounds)
    except OSError:
        return 0.0


def _error_line(log: Path, code: int) -> str:
    """The line in which a program said why it failed."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("fedmq: ")]
    if own or lines:
        return (own or lines)[-1].removeprefix("fedmq: ")
    return f"ended with exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
