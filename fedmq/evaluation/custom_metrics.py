"""User-defined metrics, loaded from Python files or from installed packages (entry point group ``fedmq.metrics``).

A scenario names them: ``evaluation: {metrics: [./mine.py, mrr]}``. A file defines ``METRIC``, one
:class:`~fedmq.evaluation.metrics.Measure`, or ``METRICS``, a list of them; an entry point names a module that does. The
coordinator, the evaluator and the silos all load them. A value that is not a number, or not within the bounds, is left
out and named on stderr; the other metrics are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from fedmq.config import plug_ins
from fedmq.config.sections import Evaluation
from fedmq.errors import InputError
from fedmq.evaluation.metrics import BUILT_IN, Measure, Measured, Metric, is_known
from fedmq.text import nearest, print_line

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
    return (*BUILT_IN, *(_contained(measure, plug_ins.label(source)) for source, measure in user_measures))


def _contained(measure: Measure, source: str) -> Measure:
    """The measure without the values that cannot be used: they must not take the other metrics with them."""

    def compute(items: Measured) -> dict[str, float]:
        values: dict[str, float] = {}
        try:
            for name, value in measure.compute(items).items():
                if (wrong := _objection(name, value, measure.metrics)) is None:
                    values[name] = float(value)
                else:
                    _tell(f"metric {wrong}; {source} computed it, and it is left out")
        except (MemoryError, OSError):
            raise
        except Exception as error:
            names = ", ".join(measure.names_under(items.evaluation))
            _tell(f"metric {names}: left out, {source} failed: {type(error).__name__}: {error}")
        return values

    return replace(measure, compute=compute)


def _objection(name: str, value: object, metrics: Iterable[Metric]) -> str | None:
    metric = next((hit for entry in metrics if (hit := entry.named(name))), None)
    if metric is None:
        return f"{name}, which has no entry"
    try:
        return metric.objection(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{name}: found a {type(value).__name__}, allowed: a number"


@lru_cache
def _tell(line: str) -> None:
    """Print a line once per process: silos compute their metrics again and again."""
    print_line(line, error=True)


def custom_metrics(measures: Iterable[Measure]) -> tuple[Metric, ...]:
    """Entries of the user-defined measures among these."""
    return tuple(metric for measure in measures if measure not in BUILT_IN for metric in measure.metrics)


def _loaded(source: str) -> tuple[Measure, ...]:
    """Load the measures of a file reference or of an entry point."""
    place = f"{_PLACE}: {plug_ins.label(source)}"
    if plug_ins.is_reference(source):
        module: Any = plug_ins.load(source)
    else:
        installed = {entry.name: entry for entry in entry_points(group=GROUP)}
        if source not in installed:
            known = ", ".join(nearest(source, installed)) or "none is installed"
            raise InputError(_PLACE, source, f"a Python file (./mine.py), or an entry point of {GROUP}: {known}")
        try:
            module = installed[source].load()
        except Exception as error:
            raise InputError(place, f"{type(error).__name__}: {error}", "a package that can be imported") from error
    measures = [*([module.METRIC] if hasattr(module, "METRIC") else []), *getattr(module, "METRICS", ())]
    if not measures:
        raise InputError(place, "neither METRIC nor METRICS", _ALLOWED)
    strange = [item for item in measures if not isinstance(item, Measure)]
    if strange:
        raise InputError(place, f"a {type(strange[0]).__name__}", _ALLOWED)
    return tuple(measures)


def described(measures: Iterable[Measure], names: Iterable[str]) -> dict[str, Metric]:
    """Entries of user-defined metrics by name, for a run's summary: its readers may not have their code."""
    entries = custom_metrics(measures)
    entries_by_name = ((name, next((hit for entry in entries if (hit := entry.named(name))), None)) for name in names)
    return {name: metric for name, metric in entries_by_name if metric is not None}


def unmeasured(
    measures: Iterable[Measure], evaluation: Evaluation, measured: Iterable[tuple[str, Mapping[str, float], bool]]
) -> dict[str, list[str]]:
    """User-defined metrics without a value, and for whose items, by name.

    ``measured`` says whose items, the values, and whether the items are a whole split.
    """
    lacking: dict[str, dict[str, None]] = {}
    for whose, values, whole in measured:
        for part in measures:
            if part not in BUILT_IN and (whole or not part.whole_split_only):
                for name in part.names_under(evaluation):
                    if name not in values:
                        lacking.setdefault(name, {})[whose] = None
    return {name: list(whose) for name, whose in lacking.items()}
