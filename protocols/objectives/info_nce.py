"""InfoNCE over adapters and heads, the default: loss and temperature are the method's (``protocols/fedavg.py``)."""

from __future__ import annotations

from dataclasses import dataclass

from fedmq.models.objective_registry import ObjectiveKind


@dataclass(frozen=True)
class Options:
    """InfoNCE has no options of its own."""


OBJECTIVE = ObjectiveKind(Options, None, lambda options: None, needs_labels=False, on_features=True, contrasts=True)
