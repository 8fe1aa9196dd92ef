"""pFedMMA: multi-modal adapters whose middle layers are averaged while all else stays personal (Ghiasvand et al. 2025).

``backbone.adapter: mma`` gives both towers such adapters, x + s up(relu(shared(relu(down x)))), their middle layers
shared by the towers; RCSR's comparison has s = 0.5 (``backbone.adapter_scale``), the original 0.001. Every silo keeps
its own projections up and down and its own heads. The loss is the scenario's, not the original's classification, and
adapters are drawn small as all others are, so that the frozen encoder is where a silo starts; both are our choice.
As in the original, the first synchronous round asks every silo, whatever the participation.
"""

from __future__ import annotations

from fedmq.errors import InputError
from fedmq.wire.layout import Layout
from protocols._partial import averaging
from protocols.fedavg import FedAvgOptions

#: Name prefix of the middle layers.
SHARED = "shared.adapters."


def middle_layers(options: FedAvgOptions, layout: Layout) -> tuple[str, ...]:
    """Names of the adapters' middle layers, in the layout's order.

    Raises:
        InputError: the model has no such adapters.
    """
    shared = tuple(entry.name for entry in layout.entries if entry.name.startswith(SHARED))
    if not shared:
        raise InputError("backbone.adapter", "a model without shared adapters", "mma, which protocol pfedmma averages")
    return shared


PROTOCOL = averaging(FedAvgOptions, middle_layers, first_round_selects_all=True)
