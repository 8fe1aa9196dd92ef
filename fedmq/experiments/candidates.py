"""Candidates of ``--select``: settings of which the best one is chosen on the validation split."""

from __future__ import annotations

from collections.abc import Mapping

from fedmq.config.scenario import Scenario
from fedmq.config.sections import Evaluation
from fedmq.errors import InputError

#: What does not change the model that a run trains: where and how it is computed, and what is measured of it.
_SAME_MODEL: Mapping[str, bool | set[str]] = {
    "name": True,
    "device": True,
    "launcher": True,
    "track": True,
    "wire": True,
    "silos": {"slots", "hosts", "needs"},
    "evaluation": set(Evaluation.model_fields) - {"patience", "every"},
}


def check_candidates(scenarios: Mapping[str, Scenario]) -> None:
    """Refuse candidates that train the same model, of which none is better.

    Args:
        scenarios: scenarios of a row's candidates, by their settings.

    Raises:
        InputError: two of them differ only in where the run is computed or what is measured.
    """
    models: dict[str, str] = {}
    for settings, scenario in scenarios.items():
        model = scenario.model_dump_json(exclude=_SAME_MODEL)
        if (other := models.setdefault(model, settings)) != settings:
            raise InputError("--select", settings, f"candidates that differ: it trains the same model as {other}")
