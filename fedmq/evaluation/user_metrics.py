"""Metrics of the user's own: from a Python file, or from an installed package (entry point group ``fedmq.metrics``).

A scenario names them: ``evaluation: {metrics: [./mine.py, mrr]}``. A file defines ``METRIC``, one
:class:`~fedmq.evaluation.metrics.Measure`, or ``METRICS``, several; an entry point leads to the same. The coordinator,
the evaluator and the silos all load them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedmq.config.loader import nearest
from fedmq.config.scenario import Evaluation
from fedmq.config.user_files import load_user_module
from fedmq.errors import InputError
from fedmq.evaluation.metrics import BUILT_IN, Measure, Metric, is_known

#: Entry point group of installed metrics.
GROUP = "fedmq.metrics"
_PLACE = "evaluation.metrics"
_ALLOWED = "a Measure, or a list of them (fedmq.evaluation.metrics)"


def measures_of(evaluation: Evaluation) -> tuple[Measure, ...]:
    """All that a scenario's evaluation measures: the built-in measures, then the user's own.

    Raises:
        InputError: a file or an entry point is not there, is no measure, or has a metric that there is already.
    """
    own = [(source, measure) for source in evaluation.metrics for measure in _loaded(source)]
    taken: dict[str, str] = {}
    for source, measure in own:
        for name in measure.names_under(evaluation):
            if is_known(name) or name in taken:
                where = f"of {taken[name]}" if name in taken else "of fedmq's own"
                raise InputError(f"{_PLACE}: {source}", f"metric {name}", f"a name that is not one {where}")
            taken[name] = source
    return (*BUILT_IN, *(measure for _, measure in own))


def own_metrics(measures: Iterable[Measure]) -> tuple[Metric, ...]:
    """The entries of those measures that are the user's own."""
    return tuple(metric for measure in measures if measure not in BUILT_IN for metric in measure.metrics)


def _loaded(source: str) -> tuple[Measure, ...]:
    if source.endswith(".py"):
        module = load_user_module(Path(source), ("METRIC", "METRICS"))
        found = [*getattr(module, "METRICS", ()), *([module.METRIC] if hasattr(module, "METRIC") else [])]
        return _checked(source, found)
    installed = {each.name: each for each in entry_points(group=GROUP)}
    if source not in installed:
        known = f"one installed as an entry point {GROUP}: {', '.join(nearest(source, installed)) or 'there is none'}"
        raise InputError(_PLACE, source, f"a Python file (./mine.py), or {known}")
    loaded: Any = installed[source].load()
    return _checked(source, loaded if isinstance(loaded, list | tuple) else [loaded])


def _checked(source: str, found: Iterable[object]) -> tuple[Measure, ...]:
    measures = []
    for each in found:
        if not isinstance(each, Measure):
            raise InputError(f"{_PLACE}: {source}", type(each).__name__, _ALLOWED)
        measures.append(each)
    return tuple(measures)


def described(measures: Iterable[Measure], names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Entries of the user's own metrics as plain data, for a run's summary: its readers may not have their code.

    Args:
        measures: of the run.
        names: measured in the run.
    """
    own = own_metrics(measures)
    found = ((name, next((hit for each in own if (hit := each.named(name))), None)) for name in names)
    return {name: vars(metric) for name, metric in found if metric is not None}


def metrics_described(entries: Mapping[str, Mapping[str, Any]]) -> tuple[Metric, ...]:
    """The inverse of :func:`described`."""
    return tuple(Metric(**entry) for entry in entries.values())
