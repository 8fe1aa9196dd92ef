"""Bottleneck adapters, separate per tower (RCSR) or multi-modal with a middle layer shared by both towers (pFedMMA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

T = TypeVar("T")
Layer = Callable[[Tensor], Tensor]


class Adapter(nn.Module):
    """Bottleneck adapter: x + up(gelu(down(x))) (RCSR).

    Args:
        width: size of the last dimension of x.
        bottleneck: width of the bottleneck.
    """

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, bottleneck, device="meta")
        self.up = nn.Linear(bottleneck, width, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """float32 [..., width] to the same shape."""
        update: Tensor = self.up(F.gelu(self.down(x)))
        return x + update


def through_shared(x: Tensor, down: Layer, shared: Layer, up: Layer, scale: float) -> Tensor:
    """Multi-modal adapter x + scale * up(relu(shared(relu(down(x))))) of x [..., width] (pFedMMA)."""
    return x + scale * up(F.relu(shared(F.relu(down(x)))))


class SharedAdapters(nn.Module):
    """Middle layers of multi-modal adapters, one per site, shared by both towers (pFedMMA).

    Args:
        sites: number of adapters per tower.
        bottleneck: width of the layers.
        scale: scale of every adapter's update.
    """

    def __init__(self, sites: int, bottleneck: int, scale: float) -> None:
        super().__init__()
        layers = {site(i): nn.Linear(bottleneck, bottleneck, device="meta") for i in range(sites)}
        self.adapters = nn.ModuleDict(layers)
        self.scale = scale

    def forward(self, out: T, tower: nn.Module) -> T:
        """Return a tower's output unchanged: the shared layers are applied inside the tower."""
        del tower
        return out


class MultiModalAdapter(nn.Module):
    """One tower's layers of a multi-modal adapter, around a middle layer shared by both towers (pFedMMA).

    Args:
        width: size of the last dimension of x.
        bottleneck: width of the middle layer.
        shared: the middle layer, a submodule of :class:`SharedAdapters` and not of this module.
        scale: scale of the adapter's update.
    """

    def __init__(self, width: int, bottleneck: int, shared: Layer, scale: float) -> None:
        super().__init__()
        self.down = nn.Linear(width, bottleneck, device="meta")
        self.up = nn.Linear(bottleneck, width, device="meta")
        self._shared = (shared,)  # in a tuple, so that torch does not register its parameters here too
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """float32 [..., width] to the same shape."""
        return through_shared(x, self.down, self._shared[0], self.up, self._scale)


def site(index: int) -> str:
    """Name of an adapter site: two digits, so that sorting by name sorts by index."""
    return f"{index:02d}"
