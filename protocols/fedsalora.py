"""FedSA-LoRA: silos train both factors of low-rank adapters, A is averaged, B stays personal (Guo et al., 2025).

The adapters s B A of ``backbone.adapter: lora`` are those of ``ffalora``. The paper finds that A learns what silos
share and B what differs (arXiv 2410.01463, section 3). A silo starts from the averaged A and its own B, trains both,
and uploads the change of A. As in the official code's configuration, the head is personal too. Personal models are
evaluated. Rank 8 with alpha 16, as there, is ``backbone: {bottleneck: 8, adapter_scale: 2}``. B starts at 0, so the
first step of a silo's first task leaves A as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from fedmq.federation.protocol import Context, Traits
from protocols.fedavg import AnchoredOptions
from protocols.ffalora import factors_of
from protocols.parts.personal_model import PartialFedAvg


class FedSaLora(PartialFedAvg):
    """FedSA-LoRA, see the module docstring."""

    Options: ClassVar[type[Any]] = AnchoredOptions

    @staticmethod
    def layers_of(options: AnchoredOptions, context: Context) -> tuple[str, ...]:
        """Names of the layers of A, in the layout's order.

        Raises:
            InputError: the network has no adapters.
        """
        return factors_of(context)

    @classmethod
    def traits_of(cls, options: AnchoredOptions) -> Traits:
        """Those of a method with personal layers."""
        return replace(super().traits_of(options), adapter="lora")


PROTOCOL = FedSaLora
