"""Main functions of the processes that ``fedmq scenario`` forks; none of them outlives the command."""

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
from fedmq.config.scenario import Scenario
from fedmq.data import extract
from fedmq.errors import FedmqError, InputError
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.federation.early_check import Fits, refuse_before_extraction
from fedmq.federation.population import build_population
from fedmq.storage.cache import cache_folder
from fedmq.text import print_line
from silos.host import HostArguments, run_host
from silos.program import SiloArguments, run_silo

_PR_SET_PDEATHSIG = 1
#: Exit code of a process whose parent is gone.
_ORPHANED = 1


def _set_up_child(*, terminable: bool = True) -> None:
    """Ignore Ctrl-C, which the parent handles, and make sure that this process does not outlive the parent.

    The kernel's parent is the forkserver, which lives as long as any process holds the write end of its pipe, which
    every child inherits. So a thread waits for the end of the actual parent, and the write end is closed. Then the
    forkserver ends as well, and the kernel kills its children, even a paused one.

    Args:
        terminable: SIGTERM ends this process. False for the coordinator, which the parent stops by a message, so that
            it can finish writing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if terminable else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent.sentinel,), name="parent", daemon=True).start()
    server: Any = getattr(forkserver, "_forkserver", None)
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        server._forkserver_alive_fd = None
        os.close(alive)


def _exit_with(sentinel: int) -> None:
    """Exit immediately when another process ends; the run can be resumed from its checkpoint."""
    wait([sentinel])
    os._exit(_ORPHANED)


def _report(line: Connection, item: object) -> None:
    """Send an item to the parent; exit if the parent is gone."""
    try:
        line.send(item)
    except ConnectionError:
        os._exit(_ORPHANED)


def ignore_sigterm() -> None:
    """Ignore SIGTERM, with which the parent stops silos that have not joined and an evaluator without a result.

    From then on, the coordinator stops this process by a message.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _print_error(error: FedmqError) -> int:
    print_line(f"fedmq: {error}", error=True)
    return 2 if isinstance(error, InputError) else 1


def coordinator_process(arguments: CoordinatorArguments, line: Connection) -> None:
    """Run the coordinator; sends its status, its orders and finally its result to the parent."""
    _set_up_child(terminable=False)
    try:
        outcome = run_coordinator(
            arguments,
            listening=partial(_report, line),
            status=partial(_report, line),
            stop_wanted=lambda: line.poll(0),
            order=lambda order: _pass_on(order, line),
        )
    except InputError as error:
        _report(line, (error.place, str(error.found), error.allowed))
    except FedmqError as error:
        _report(line, (str(error),))
    else:
        _report(line, outcome)


def _pass_on(order: ProcessCommand, line: Connection) -> None:
    """Send the order of a scripted fault to the parent; the coordinator kills itself if the order says so."""
    _report(line, order)
    if order.what == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def silo_process(arguments: SiloArguments) -> None:
    """Run a silo."""
    _set_up_child()
    try:
        run_silo(arguments, joined=ignore_sigterm)
    except FedmqError as error:
        sys.exit(_print_error(error))


def host_process(arguments: HostArguments) -> None:
    """Run a host of several silos."""
    _set_up_child()
    try:
        run_host(arguments, joined=ignore_sigterm)
    except FedmqError as error:
        sys.exit(_print_error(error))


def evaluator_process(arguments: EvaluatorArguments) -> None:
    """Run the evaluator."""
    _set_up_child()
    try:
        run_evaluator(arguments, measured=ignore_sigterm)
    except FedmqError as error:
        sys.exit(_print_error(error))


def population_process(run: ResolvedRun, line: Connection) -> None:
    """Prepare the data; sends progress and finally the folder or the error to the parent."""
    _set_up_child()
    try:
        folder = population_here(run, lambda what, done, total: _report(line, (what, done, total)))
    except InputError as error:
        _report(line, ("input", error.place, str(error.found), error.allowed))
    except FedmqError as error:
        _report(line, (str(error),))
    else:
        _report(line, folder)


def _fits(run: ResolvedRun) -> Fits:
    """Raises InputError if the run's programs would refuse a scenario with the prepared data in a folder."""

    def fits(scenario: Scenario, folder: Path) -> None:
        here = scenario.model_copy(update={"device": "cpu"})
        check(here, build_population(here, folder=folder, pooled=run.pooled))

    return fits


def check_without_features(run: ResolvedRun, progress: Callable[[str, int, int], None] | None) -> None:
    """Refuse a run whose data do not suffice, without extracting features.

    Args:
        run: the run.
        progress: called with (what, done, total) during long steps.

    Raises:
        InputError: like :func:`population_here`, as far as this can be determined without features.
    """
    scenario, fits = run.scenario, _fits(run)
    if scenario.backbone.name == "features":
        fits(scenario, build_population(scenario, progress).prepared.folder)
        return
    made = extract.plan(scenario.dealt, scenario.backbone, cache_folder(), scenario.seed, progress=progress)
    refuse_before_extraction(made, scenario, fits)


def population_here(
    run: ResolvedRun, progress: Callable[[str, int, int], None] | None, folder: Path | None = None
) -> Path:
    """Prepare the run's data in this process, otherwise like ``fedmq.launch.supervisor.prepare_population``.

    Args:
        run: the run.
        progress: called with (what, done, total) during long steps.
        folder: folder of the prepared data, if known.

    Returns:
        The folder of the prepared data.

    Raises:
        InputError: the run's programs would refuse the data, or the scenario with these data.
    """
    population = build_population(run.scenario, progress, folder=folder, pooled=run.pooled, fits=_fits(run))
    check(run.scenario, population)
    return population.prepared.folder
