"""Bottleneck adapters: each tower's own (RCSR), or multi-modal with a middle layer both towers share (pFedMMA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

T = TypeVar("T")
Layer = Callable[[Tensor], Tensor]


class Adapter(nn.Module):
    """Bottleneck adapter: x + up(gelu(down(x))).

    Args:
        width: last dimension of x.
        bottleneck: width of the bottleneck.
    """

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, bottleneck, device="meta")
        self.up = nn.Linear(bottleneck, width, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """float32 [..., width] to the same shape."""
        change: Tensor = self.up(F.gelu(self.down(x)))
        return x + change


def through_shared(x: Tensor, down: Layer, shared: Layer, up: Layer, scale: float) -> Tensor:
    """Multi-modal adapter x + s up(relu(shared(relu(down x)))) of x [..., width] (pFedMMA)."""
    return x + scale * up(F.relu(shared(F.relu(down(x)))))


class SharedAdapters(nn.Module):
    """The middle layers of multi-modal adapters, one per site, that both towers go through.

    Args:
        sites: how many adapters a tower has.
        bottleneck: width of the layers.
        scale: s of every adapter.
    """

    def __init__(self, sites: int, bottleneck: int, scale: float) -> None:
        super().__init__()
        layers = {site(i): nn.Linear(bottleneck, bottleneck, device="meta") for i in range(sites)}
        self.adapters = nn.ModuleDict(layers)
        self.scale = scale

    def forward(self, out: T, tower: nn.Module) -> T:
        """What a tower made, as it is: the layers did their part inside it."""
        del tower
        return out


class MultiModalAdapter(nn.Module):
    """One tower's layers of a multi-modal adapter, around one that belongs to both towers.

    Args:
        width: last dimension of x.
        bottleneck: width of the middle layer.
        shared: the middle layer; a parameter of :class:`SharedAdapters`, not of this module.
        scale: s.
    """

    def __init__(self, width: int, bottleneck: int, shared: Layer, scale: float) -> None:
        super().__init__()
        self.down = nn.Linear(width, bottleneck, device="meta")
        self.up = nn.Linear(bottleneck, width, device="meta")
        self._shared = (shared,)  # in a tuple, so that torch does not list its parameters here too
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """float32 [..., width] to the same shape."""
        return through_shared(x, self.down, self._shared[0], self.up, self._scale)


def site(index: int) -> str:
    """Name of an adapter site; two digits, for the layout sorts by name and a reader expects 2 before 10."""
    return f"{index:02d}"
