"""The id of a run, a digest of its scenario without machine-dependent keys; needs neither data nor torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

#: Keys that depend on the machine and do not enter the id: whole keys, or the listed keys of a section.
_MACHINE_KEYS: Mapping[str, tuple[str, ...]] = {
    "device": (),
    "launcher": (),
    "track": (),
    "wire": (),
    "data": ("path", "annotations", "images"),
    "silos": ("slots", "hosts", "needs"),
    "participation": ("trace", "minimum"),
    "aggregation": ("task_limit",),
    "evaluation": ("keep",),
}

#: Keys that were added after the first format, with their defaults, at which they do not enter the id.
_LATER_KEYS: Mapping[str, Mapping[str, object]] = {
    "evaluation": {
        "personal_every": 0,
        "metrics": [],
        "heldout": None,
        "keep": "last",
        "patience": None,
        "silo_gallery": "whole",
    },
    "participation": {"minimum": None},
    "aggregation": {"task_limit": None},
    "training": {"schedule_rounds": None},
    "data": {"column": None},
    "partition": {"column": None, "least": 1},
    "missing_modality": {"per": "silo"},
}


def facts_of(plain: Mapping[str, object]) -> dict[str, object]:
    """The part of a scenario that identifies a run.

    Args:
        plain: a complete scenario as plain data, as in ``scenario.yaml`` of a run folder.
    """
    facts = {key: value for key, value in plain.items() if _MACHINE_KEYS.get(key, ("",)) != ()}
    training = facts.get("training")
    if isinstance(training, Mapping):
        # A run that is extended by further rounds stays the same run.
        facts["rounds"] = training.get("schedule_rounds") or facts.get("rounds")
        facts["training"] = {name: value for name, value in training.items() if name != "schedule_rounds"}
    for key, names in _MACHINE_KEYS.items():
        part = facts.get(key)
        if names and isinstance(part, Mapping):
            facts[key] = {name: value for name, value in part.items() if name not in names}
    return without_younger(facts)


def without_younger(facts: Mapping[str, object]) -> dict[str, object]:
    """A scenario as plain data without later keys at their defaults.

    Otherwise the ids of existing runs would change.
    """
    kept = dict(facts)
    for key, later in _LATER_KEYS.items():
        part = kept.get(key)
        if isinstance(part, Mapping):
            items = part.items()
            kept[key] = {name: value for name, value in items if name not in later or value != later[name]}
    return kept


def name_of(plain: Mapping[str, object]) -> str:
    """The run's id on the wire: equal for equal scenarios, regardless of the machine and the paths of files.

    Args:
        plain: as for :func:`facts_of`.
    """
    return f"{plain.get('name')}-{digest_of(plain)[:12]}"


def digest_of(plain: Mapping[str, object]) -> str:
    """SHA-256 (hex) of a scenario, of which the run's id has the first 12 digits.

    Args:
        plain: as for :func:`facts_of`.
    """
    return hashlib.sha256(json.dumps(facts_of(plain), sort_keys=True, default=str).encode()).hexdigest()
