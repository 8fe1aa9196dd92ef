"""What each process that ``fedmq scenario`` starts does, from its fork to its end; none outlives who started it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from coordinator.fault_injection import ProcessCommand
from coordinator.program import CoordinatorArguments, check, run_coordinator
from fedmq.config.resolve import ResolvedRun
from fedmq.errors import FedmqError, InputError
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.federation.population import build_population
from silos.program import SiloArguments, run_silo

_PR_SET_PDEATHSIG = 1
#: Exit code of a process whose starter is gone; nobody is left to read it.
_ORPHANED = 1


def _settle_in(*, terminable: bool = True) -> None:
    """A child leaves Ctrl-C to the process that started it and never outlives it.

    To the kernel its parent is the forkserver, so dying with the parent is not enough: the forkserver ends once nobody
    holds the write end of its pipe any more, and every child is given one. A thread waits for the starter's end; and
    the write end is closed, so that the forkserver ends too and takes with it a child that stands still.

    Args:
        terminable: SIGTERM ends it; the coordinator, told to stop by its starter, finishes what it writes instead.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if terminable else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    starter = multiprocessing.parent_process()
    if starter is not None:
        threading.Thread(target=_end_with, args=(starter.sentinel,), name="starter", daemon=True).start()
    server: Any = getattr(forkserver, "_forkserver", None)
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        server._forkserver_alive_fd = None
        os.close(alive)


def _end_with(sentinel: int) -> None:
    """End this process at once when another ends; the run goes on from its checkpoint, as after any kill."""
    wait([sentinel])
    os._exit(_ORPHANED)


def _tell(line: Connection, item: object) -> None:
    """Tell the starter; if it listens no more, nobody needs what this process does."""
    try:
        line.send(item)
    except ConnectionError:
        os._exit(_ORPHANED)


def _ignore_sigterm() -> None:
    """Leave it to the coordinator to stop this process, as it does once a silo has joined or the evaluator measured.

    Until then a SIGTERM of its starter ends it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _say(error: FedmqError) -> int:
    print(f"fedmq: {error}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, InputError) else 1


def coordinator_process(arguments: CoordinatorArguments, line: Connection) -> None:
    """The coordinator; the line tells its starter the status, the orders, and at last the outcome."""
    _settle_in(terminable=False)
    try:
        outcome = run_coordinator(
            arguments,
            listening=partial(_tell, line),
            status=partial(_tell, line),
            stop_wanted=lambda: line.poll(0),
            order=lambda order: _pass_on(order, line),
        )
    except InputError as error:
        _tell(line, (error.place, str(error.found), error.allowed))
    except FedmqError as error:
        _tell(line, (str(error),))
    else:
        _tell(line, outcome)


def _pass_on(order: ProcessCommand, line: Connection) -> None:
    """Tell the parent what a scripted fault needs; dying is the coordinator's own part of it."""
    _tell(line, order)
    if order.what == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def silo_process(arguments: SiloArguments) -> None:
    """A silo."""
    _settle_in()
    try:
        run_silo(arguments, joined=_ignore_sigterm)
    except FedmqError as error:
        sys.exit(_say(error))


def evaluator_process(arguments: EvaluatorArguments) -> None:
    """The evaluator."""
    _settle_in()
    try:
        run_evaluator(arguments, measured=_ignore_sigterm)
    except FedmqError as error:
        sys.exit(_say(error))


def world_process(run: ResolvedRun, line: Connection) -> None:
    """Prepares the data; the line tells progress, and at last the folder or what went wrong."""
    _settle_in()
    try:
        folder = population_here(run, lambda what, done, total: _tell(line, (what, done, total)))
    except InputError as error:
        _tell(line, ("input", error.place, str(error.found), error.allowed))
    except FedmqError as error:
        _tell(line, (str(error),))
    else:
        _tell(line, folder)


def population_here(
    run: ResolvedRun, progress: Callable[[str, int, int], None] | None, folder: Path | None = None
) -> Path:
    """Make the run's world in the cache, in this process; as ``fedmq.launch.supervisor.prepare_population`` otherwise.

    Args:
        run: as resolved.
        progress: told during anything long.
        folder: of the prepared data, if it is there.

    Raises:
        InputError: the data, or the scenario with these data, would be refused by a run's programs.
    """
    population = build_population(run.scenario, progress, folder=folder, pooled=run.pooled)
    check(run.scenario, population)
    return population.prepared.folder
