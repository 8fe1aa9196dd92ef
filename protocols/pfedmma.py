"""pFedMMA: averages the middle layers of multi-modal adapters; all else stays personal (Ghiasvand et al., 2025).

``backbone.adapter: mma`` adds adapters x + s up(relu(shared(relu(down x)))) to both towers; the towers share the middle
layer. RCSR's comparison sets s = 0.5 (``backbone.adapter_scale``), the original 0.001. Up projections, down projections
and heads stay personal. Two choices are ours: the loss is the scenario's, not the original's classification loss, and
adapters start near zero, as all adapters here do, so that a silo starts from the frozen encoder. As in the original,
the first synchronous round selects all silos, whatever the participation rate.
"""

from __future__ import annotations

from fedmq.errors import InputError
from fedmq.wire.layout import Layout
from protocols.fedavg import AnchoredOptions
from protocols.parts.partial import averaging

#: Name prefix of the adapters' middle layers.
SHARED = "shared.adapters."


def middle_layers(options: AnchoredOptions, layout: Layout) -> tuple[str, ...]:
    """Names of the adapters' middle layers, in the layout's order.

    Raises:
        InputError: the model has no multi-modal adapters.
    """
    shared = tuple(entry.name for entry in layout.entries if entry.name.startswith(SHARED))
    if not shared:
        raise InputError("backbone.adapter", "a model without shared adapters", "mma, which protocol pfedmma averages")
    return shared


PROTOCOL = averaging(AnchoredOptions, middle_layers, first_round_selects_all=True)
