"""pFedMMA: averages the middle layers of multi-modal adapters; all else stays personal (Ghiasvand et al., 2025).

``backbone.adapter: mma`` adds adapters x + s up(relu(shared(relu(down x)))) to both towers; the towers share the middle
layer, which is averaged over the silos by their numbers of samples and sent to all. Up and down projections stay
personal. As in the official code (sajjad-ucsb/pFedMMA), nothing but adapters is trained: heads keep their initial
values, all silos have the same, and ``down`` and ``shared`` start from Kaiming's initial values. With a head of kind
``mlp`` an untrained head is a random projection; ``heads: personal`` trains it at each silo, as RCSR's comparison
suggests. As in the official code, the first synchronous round selects all silos, whatever the participation rate.

Departures: the loss is the scenario's, not a classification loss; adapters are where the scenario puts them
(``backbone.adapter_site``), not in the last eight blocks; ``up`` starts near zero, so that a silo starts from the
frozen encoder, where the official code has Kaiming's values and a scale s of 0.001. s is ``backbone.adapter_scale``, by
default 0.5 as in RCSR's comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from typing_extensions import override

from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, Traits
from protocols.fedavg import AnchoredOptions
from protocols.parts import training
from protocols.parts.personal_model import PartialFedAvg

#: Name prefix of the adapters' middle layers.
SHARED = "shared.adapters."


@dataclass(frozen=True)
class PFedMmaOptions(AnchoredOptions):
    """Options of pFedMMA, in addition to those of FedAvg.

    Args:
        heads: keep the projection heads ``frozen`` at their initial values, or train them as ``personal`` layers.
    """

    heads: Literal["frozen", "personal"] = "frozen"


class PFedMma(PartialFedAvg):
    """pFedMMA, see the module docstring."""

    Options: ClassVar[type[Any]] = PFedMmaOptions

    @staticmethod
    def layers_of(options: PFedMmaOptions, context: Context) -> tuple[str, ...]:
        """Names of the adapters' middle layers, in the layout's order.

        Raises:
            InputError: the network has no adapters.
        """
        shared = tuple(entry.name for entry in context.layout.entries if entry.name.startswith(SHARED))
        if not shared:
            allowed = "info_nce: a hash network has no multi-modal adapters"
            raise InputError("objective.base", context.objective.base, allowed)
        return shared

    @override
    def trained_ranges(self, local: Local) -> Mapping[str, Sequence[slice]]:
        if self.options.heads == "personal":
            return training.branches_of(local)
        return self.ranges_of(local, [name for name in self.context.layout.by_name if ".adapters." in name])

    @classmethod
    def traits_of(cls, options: PFedMmaOptions) -> Traits:
        """The first synchronous round selects all silos."""
        return replace(super().traits_of(options), first_round_selects_all=True, adapter="mma")


PROTOCOL = PFedMma
