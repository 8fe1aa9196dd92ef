"""Prepare the data of a run before its processes start, and refuse a run that cannot carry out its scenario on them."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from coordinator.program import check
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.data import extract
from fedmq.errors import FedmqError, InputError, RunError
from fedmq.federation.population import build_population
from fedmq.federation.preflight.data import Fits, refuse_before_extraction
from fedmq.launch.forkserver import CONTEXT, warm_up
from fedmq.launch.processes import report, set_up_child
from fedmq.storage.cache import cache_folder


def prepare_population(run: ResolvedRun, progress: Callable[[str, int, int], None] | None) -> Path:
    """Prepare the run's data in a separate process, as the encoders are needed only for extracting features.

    Args:
        run: the run.
        progress: called with (what, done, total) during long steps.

    Returns:
        The folder of the prepared data.

    Raises:
        InputError: the data cannot be read, or not partitioned as configured.
        RunError: the process died.
    """
    warm_up(run.scenario.backbone.name)
    line, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=population_process, args=(run, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            match line.recv():
                case (str(what), int(done), int(total)):
                    if progress is not None:
                        progress(what, done, total)
                case ("input", str(place), str(found), str(allowed)):
                    raise InputError(place, found, allowed)
                case (str(text),):
                    raise RunError(text)
                case Path() as folder:
                    return folder
    except EOFError:
        process.join(1.0)
        raise RunError(f"preparing the data ended with exit code {process.exitcode}, see above") from None
    finally:
        if process.is_alive():
            process.join(1.0)
            process.kill()
        process.join()


def population_process(run: ResolvedRun, line: Connection) -> None:
    """Prepare the data; sends progress and finally the folder or the error to the parent."""
    set_up_child()
    try:
        folder = population_here(run, lambda what, done, total: report(line, (what, done, total)))
    except InputError as error:
        report(line, ("input", error.place, str(error.found), error.allowed))
    except FedmqError as error:
        report(line, (str(error),))
    else:
        report(line, folder)


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
    """Prepare the run's data in this process, otherwise like :func:`prepare_population`.

    Args:
        run: the run.
        progress: called with (what, done, total) during long steps.
        folder: folder of the prepared data, if known.

    Returns:
        The folder of the prepared data.

    Raises:
        InputError: the run's programs would refuse the data, or the scenario with these data.
    """

    def before(made: extract.ExtractionPlan) -> None:
        refuse_before_extraction(made, run.scenario, _fits(run))

    population = build_population(run.scenario, progress, folder=folder, pooled=run.pooled, before=before)
    check(run.scenario, population)
    return population.prepared.folder
