"""pFedMMA: averages the middle layers of multi-modal adapters; all else stays personal (Ghiasvand et al., 2025).

``backbone.adapter: mma`` adds adapters x + s up(relu(shared(relu(down x)))) to both towers; the towers share the middle
layer. RCSR's comparison sets s = 0.5 (``backbone.adapter_scale``), the original 0.001. Up projections, down projections
and heads stay personal. Two choices are ours: the loss is the scenario's, not the original's classification loss, and
adapters start near zero, as all adapters here do, so that a silo starts from the frozen encoder. As in the original,
the first synchronous round selects all silos, whatever the participation rate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Traits
from protocols.fedavg import AnchoredOptions
from protocols.parts.personal_model import PartialFedAvg

#: Name prefix of the adapters' middle layers.
SHARED = "shared.adapters."


class PFedMma(PartialFedAvg):
    """pFedMMA, see the module docstring."""

    Options: ClassVar[type[Any]] = AnchoredOptions

    @staticmethod
    def layers_of(options: AnchoredOptions, context: Context) -> tuple[str, ...]:
        """Names of the adapters' middle layers, in the layout's order.

        Raises:
            InputError: the model has no multi-modal adapters.
        """
        shared = tuple(entry.name for entry in context.layout.entries if entry.name.startswith(SHARED))
        if not shared:
            found, allowed = "a model without shared adapters", "mma, which protocol pfedmma averages"
            raise InputError("backbone.adapter", found, allowed)
        return shared

    @classmethod
    def traits_of(cls, options: AnchoredOptions) -> Traits:
        """The first synchronous round selects all silos."""
        return replace(super().traits_of(options), first_round_selects_all=True)


PROTOCOL = PFedMma
