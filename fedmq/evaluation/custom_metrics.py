"""User-defined metrics, loaded from Python files or from installed packages (entry point group ``fedmq.metrics``).

A scenario names them: ``evaluation: {metrics: [./mine.py, mrr]}``. A file defines ``METRIC``, one
:class:`~fedmq.evaluation.metrics.Measure`, or ``METRICS``, a list of them; an entry point names a module that does. The
coordinator, the evaluator and the silos all load them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from fedmq.config import plug_ins
from fedmq.config.sections import Evaluation
from fedmq.errors import InputError
from fedmq.evaluation.metrics import BUILT_IN, Measure, Metric, is_known
from fedmq.text import nearest

#: Entry point group of installed metrics.
GROUP = "fedmq.metrics"
_PLACE = "evaluation.metrics"
_ALLOWED = "METRIC, a Measure (fedmq.evaluation.metrics), or METRICS, a list of them"


def measures_of(evaluation: Evaluation) -> tuple[Measure, ...]:
    """The measures of a scenario's evaluation: the built-in ones, then the user-defined ones.

    Raises:
        InputError: a file or an entry point is not found, defines no measure, or defines a metric that exists already.
    """
    user_measures = [(source, measure) for source in evaluation.metrics for measure in _loaded(source)]
    taken: dict[str, str] = {}
    for source, measure in user_measures:
        for name in measure.names_under(evaluation):
            if is_known(name) or name in taken:
                where = f"of {taken[name]}" if name in taken else "of fedmq's own"
                raise InputError(f"{_PLACE}: {source}", f"metric {name}", f"a name that is not one {where}")
            taken[name] = source
    return (*BUILT_IN, *(measure for _, measure in user_measures))


def custom_metrics(measures: Iterable[Measure]) -> tuple[Metric, ...]:
    """Entries of the user-defined measures among these."""
    return tuple(metric for measure in measures if measure not in BUILT_IN for metric in measure.metrics)


def _loaded(source: str) -> tuple[Measure, ...]:
    """Load the measures of a file reference or of an entry point."""
    place = f"{_PLACE}: {plug_ins.label(source)}"
    if plug_ins.is_reference(source):
        module: Any = plug_ins.load(source)
    else:
        installed = {each.name: each for each in entry_points(group=GROUP)}
        if source not in installed:
            known = ", ".join(nearest(source, installed)) or "none is installed"
            raise InputError(_PLACE, source, f"a Python file (./mine.py), or an entry point of {GROUP}: {known}")
        try:
            module = installed[source].load()
        except Exception as error:
            raise InputError(place, f"{type(error).__name__}: {error}", "a package that can be imported") from error
    found = [*([module.METRIC] if hasattr(module, "METRIC") else []), *getattr(module, "METRICS", ())]
    if not found:
        raise InputError(place, "neither METRIC nor METRICS", _ALLOWED)
    strange = [each for each in found if not isinstance(each, Measure)]
    if strange:
        raise InputError(place, f"a {type(strange[0]).__name__}", _ALLOWED)
    return tuple(found)


def described(measures: Iterable[Measure], names: Iterable[str]) -> dict[str, Metric]:
    """Entries of user-defined metrics by name, for a run's summary: its readers may not have their code.

    Args:
        measures: measures of the run.
        names: names of the metrics measured in the run.
    """
    entries = custom_metrics(measures)
    found = ((name, next((hit for each in entries if (hit := each.named(name))), None)) for name in names)
    return {name: metric for name, metric in found if metric is not None}
