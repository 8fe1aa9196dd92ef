"""The name of a run: a digest of all that its scenario says but where it runs; found without the data and torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

#: What a scenario says of where it runs and where its files lie; of a mapping, keys of it.
_HERE: Mapping[str, tuple[str, ...]] = {
    "device": (),
    "launcher": (),
    "data": ("path", "annotations", "images"),
    "silos": ("slots",),
    "participation": ("trace",),
}

#: Keys that scenarios did not always have, with their defaults.
_YOUNGER: Mapping[str, Mapping[str, object]] = {"evaluation": {"personal_every": 0, "metrics": []}}


def facts_of(plain: Mapping[str, object]) -> dict[str, object]:
    """What a run is a run of.

    Args:
        plain: a whole scenario as plain data, as ``scenario.yaml`` of a run folder has it.
    """
    facts = {key: value for key, value in plain.items() if _HERE.get(key, ("",)) != ()}
    for key, own in _HERE.items():
        part = facts.get(key)
        if own and isinstance(part, Mapping):
            facts[key] = {name: value for name, value in part.items() if name not in own}
    return without_younger(facts)


def without_younger(facts: Mapping[str, object]) -> dict[str, object]:
    """A scenario as plain data without keys at their defaults that scenarios did not always have.

    With them no run that was named before would be found again.
    """
    kept = dict(facts)
    for key, younger in _YOUNGER.items():
        part = kept.get(key)
        if isinstance(part, Mapping):
            own = part.items()
            kept[key] = {name: value for name, value in own if name not in younger or value != younger[name]}
    return kept


def name_of(plain: Mapping[str, object]) -> str:
    """The run's name on the wire: equal only for equal scenarios, wherever they run and wherever their files lie.

    Args:
        plain: as for :func:`facts_of`.
    """
    digest = hashlib.sha256(json.dumps(facts_of(plain), sort_keys=True, default=str).encode()).hexdigest()
    return f"{plain.get('name')}-{digest[:12]}"
