"""FFA-LoRA: silos train the factor B of low-rank adapters, A stays at its initial value (Sun et al., 2024).

``backbone.adapter: lora`` adds s B A to frozen weights, with B = 0 at the start. FedAvg of both factors (``protocol:
fedavg``) gives mean(B_i) mean(A_i), which is not the mean of the silos' products B_i A_i. With one A for all silos,
which is never trained, the two are equal (arXiv 2403.12313), and updates have half of the adapters' numbers:

ΔW = s mean(B_i) A = s mean(B_i A)

All silos derive the same A from the seed. The projection heads are trained and averaged as well, and the global model
is evaluated. The LoRA rank is ``backbone.bottleneck``, and s, alpha / rank, is ``backbone.adapter_scale``. In the
blocks of an open_clip model adapters change the query and value weights; on features the frozen weight is the identity,
x + s B A x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, Traits
from protocols.fedavg import AnchoredOptions
from protocols.parts.personal_model import PartialFedAvg


def factors_of(context: Context) -> tuple[str, ...]:
    """Names of the layers of A, in the layout's order.

    Raises:
        InputError: the network has no adapters.
    """
    adapters = [entry.name for entry in context.layout.entries if ".adapters." in entry.name]
    if not adapters:
        raise InputError("objective.base", context.objective.base, "info_nce: a hash network has no low-rank adapters")
    return tuple(each for each in adapters if ".down." in each)


class FfaLora(PartialFedAvg):
    """FFA-LoRA, see the module docstring."""

    Options: ClassVar[type[Any]] = AnchoredOptions

    @staticmethod
    def layers_of(options: AnchoredOptions, context: Context) -> tuple[str, ...]:
        """Names of all layers but A, in the layout's order.

        Raises:
            InputError: the network has no adapters.
        """
        frozen = factors_of(context)
        return tuple(entry.name for entry in context.layout.entries if entry.name not in frozen)

    @classmethod
    def traits_of(cls, options: AnchoredOptions) -> Traits:
        """FedAvg's: the frozen layers are the same everywhere, so that the global model is complete."""
        return Traits(adapter="lora")

    @override
    def trained_ranges(self, local: Local) -> Mapping[str, Sequence[slice]]:
        return self.ranges_of(local, self.shared)

    @override
    def kept(self, local: Local) -> dict[str, Tensor]:
        return {}


PROTOCOL = FfaLora
