"""FedPer: base layers are averaged, the layers on top stay personal (Arivazhagan et al. 2019).

RCSR's table calls adapters and projection heads personal, which would leave nothing to share. Here the
projection heads are, and the last layer of a hash network; ``personal_layers`` names others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Encoders, Local, MergeResult, Reply, SiloFacts, State, Task, Trained
from fedmq.wire.layout import Layout
from fedmq.wire.messages import Payload
from protocols import fedavg
from protocols._partial import PartialFedAvg

#: The top layers of every network there is: projection heads, hash layers with their classifiers, DSCMR's common space.
_TOP = tuple(f"{tower}.{layer}." for tower in ("visual", "text") for layer in ("head", "last", "classifier"))
TOP = (*_TOP, "shared.head.", "shared.base.", "shared.enhance.", "shared.label.")


@dataclass(frozen=True)
class FedPerOptions(fedavg.FedAvgOptions):
    """Options of FedPer: FedAvg's and

    Args:
        personal_layers: name prefixes of the layers that stay personal, separated by commas, as ``visual.head,text.``;
            empty takes the projection heads, of a hash network the last layer.
    """

    personal_layers: str = ""


def shared_layers(layout: Layout, personal_layers: str) -> tuple[str, ...]:
    """Names of the layers that are not personal, in the layout's order.

    Raises:
        InputError: a prefix that no layer has, or every layer is personal.
    """
    place, names = "protocol.personal_layers", [entry.name for entry in layout.entries]
    prefixes = tuple(each.strip() for each in personal_layers.split(",") if each.strip())
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise InputError(place, prefix, f"prefixes of {', '.join(names)}")
    shared = tuple(name for name in names if not name.startswith(prefixes or TOP))
    if not shared:
        raise InputError(place, personal_layers, "at least one layer that is shared")
    return shared


class FedPer:
    """FedPer, see the module's text."""

    Options: ClassVar[type[Any]] = FedPerOptions

    def __init__(self, options: FedPerOptions, context: Context) -> None:
        self.partial = PartialFedAvg(options, context, shared_layers(context.layout, options.personal_layers))

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part."""
        return silo.image or silo.text

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update of the shared layers; otherwise as FedAvg."""
        return self.partial.uploads()

    def initial(self, theta: Tensor) -> State:
        """As FedAvg."""
        return self.partial.fedavg.initial(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The shared layers; otherwise as FedAvg."""
        return self.partial.task(state, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs over all layers."""
        return self.partial.train(local, task)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """FedAvg of the shared layers."""
        return self.partial.merge(state, replies)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that are not personal."""
        return self.partial.shared

    @staticmethod
    def own_only(options: FedPerOptions) -> bool:
        """Always: the personal layers of the coordinator's model stay as they were drawn."""
        return True

    @property
    def personalised(self) -> bool:
        """Always: the shared layers alone are no model."""
        return True

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The shared layers of now under the silo's own."""
        return self.partial.encoders(local, payloads)


PROTOCOL = FedPer
