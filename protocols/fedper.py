"""FedPer: averages the base layers; the top layers stay personal (Arivazhagan et al., 2019).

RCSR's table declares adapters and projection heads personal, which would leave nothing to share. Here the projection
heads are personal, and the last layer of a hash network; ``personal_layers`` overrides this choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedmq.errors import InputError
from fedmq.federation.protocol import Context
from protocols import fedavg
from protocols.parts.personal_model import PartialFedAvg

#: Top layers of all network kinds: projection heads, hash layers with their classifiers, DSCMR's common space.
_TOP = tuple(f"{tower}.{layer}." for tower in ("visual", "text") for layer in ("head", "last", "classifier"))
TOP = (*_TOP, "shared.head.", "shared.base.", "shared.enhance.", "shared.label.")


@dataclass(frozen=True)
class FedPerOptions(fedavg.AnchoredOptions):
    """Options of FedPer, in addition to those of FedAvg.

    Args:
        personal_layers: comma-separated name prefixes of the layers that stay personal, e.g. ``visual.head,text.``;
            if empty, the projection heads, or the last layer of a hash network.
    """

    personal_layers: str = ""


class FedPer(PartialFedAvg):
    """FedPer, see the module docstring."""

    Options: ClassVar[type[Any]] = FedPerOptions

    @staticmethod
    def layers_of(options: FedPerOptions, context: Context) -> tuple[str, ...]:
        """Names of the layers that are not personal, in the layout's order.

        Raises:
            InputError: no layer has one of the prefixes, or all layers are personal.
        """
        place, names = "protocol.personal_layers", [entry.name for entry in context.layout.entries]
        prefixes = tuple(prefix.strip() for prefix in options.personal_layers.split(",") if prefix.strip())
        for prefix in prefixes:
            if not any(name.startswith(prefix) for name in names):
                raise InputError(place, prefix, f"prefixes of {', '.join(names)}")
        shared = tuple(name for name in names if not name.startswith(prefixes or TOP))
        if not shared:
            raise InputError(place, options.personal_layers, "at least one layer that is shared")
        return shared


PROTOCOL = FedPer
