"""Types of metrics in the records of a run: names with values, and the entries of user-defined metrics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, TypeAdapter, ValidationError

from fedmq.evaluation.metrics import Metric, is_known, metric_of
from fedmq.storage.json_files import Finite


@lru_cache(4096)  # the records of a run repeat the same names
def _built_in(name: str) -> Metric | None:
    return metric_of(name) if is_known(name) else None


def check_bounds(values: Mapping[str, float]) -> None:
    """Check values by metric name; the bounds of user-defined metrics are in their own entries, and not checked here.

    Raises:
        ValueError: a value of a built-in metric is out of its bounds.
    """
    for name, value in values.items():
        if (metric := _built_in(name)) is not None and (wrong := metric.objection(value)) is not None:
            raise ValueError(wrong)


def _checked(values: dict[str, float]) -> dict[str, float]:
    check_bounds(values)
    return values


_METRIC = TypeAdapter(Metric)


def _metric(entry: object) -> Metric:
    """Parse the entry of a metric from JSON, because strict models accept dataclasses only as instances."""
    try:
        return _METRIC.validate_python(entry)
    except ValidationError as error:
        raise ValueError(error.errors(include_url=False)[0]["msg"]) from None


#: Metric name to value; of a built-in metric, within its bounds.
Figures = Annotated[dict[str, Finite], AfterValidator(_checked)]
#: Silo name to its figures.
BySilo = dict[str, Figures]
#: The entry of a user-defined metric.
MetricEntry = Annotated[Metric, BeforeValidator(_metric)]
