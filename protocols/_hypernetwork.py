"""PLFedCMH's server side: one small network per silo and branch says how to mix the silos' layers for that silo.

A network is an embedding, three ReLU layers and one linear layer per block of the model, all in one flat buffer. It is
trained by the silo's own update of the mixture it was sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedmq.wire.layout import Layout
from protocols._router import views

#: Width of the embedding and of the hidden layers.
WIDTH = 32
HIDDEN = 3


def blocks(layout: Layout, part: slice) -> dict[str, slice]:
    """The blocks of a branch: each layer's weight and bias together, as ranges of the model's flat buffer.

    Args:
        layout: of the model.
        part: the branch's range.
    """
    found: dict[str, slice] = {}
    offset = 0
    for entry in layout.entries:
        end = offset + entry.size
        if part.start <= offset < part.stop:
            owner = entry.name.rpartition(".")[0]
            start = found[owner].start if owner in found else offset
            found[owner] = slice(start, end)
        offset = end
    return found


def layout(names: Sequence[str], silos: int) -> Layout:
    """Names and shapes of one network's parameters.

    Args:
        names: of the blocks.
        silos: K, how many are mixed.
    """
    shapes: dict[str, tuple[int, ...]] = {"embedding": (WIDTH,)}
    for index in range(HIDDEN):
        shapes |= {f"hidden.{index}.weight": (WIDTH, WIDTH), f"hidden.{index}.bias": (WIDTH,)}
    for name in names:
        shapes |= {f"mix.{name}.weight": (silos, WIDTH), f"mix.{name}.bias": (silos,)}
    return Layout.of((name, shape, "float32") for name, shape in shapes.items())


def initial(shape: Layout, generator: torch.Generator) -> Tensor:
    """Parameters [H]: mixing weights uniform in [0, 1], hidden layers in +-1/sqrt(fan in), a normal embedding."""
    flat = torch.zeros(shape.size)
    for name, view in views(flat, shape).items():
        if name == "embedding":
            view.normal_(generator=generator)
        elif name.startswith("mix.") and name.endswith(".weight"):
            view.uniform_(0.0, 1.0, generator=generator)
        elif name.startswith("hidden."):
            bound = 1 / math.sqrt(WIDTH)
            view.uniform_(-bound, bound, generator=generator)
    return flat


def scores(flat: Tensor, shape: Layout, names: Sequence[str]) -> Tensor:
    """Scores a [blocks, K], at least 0: how much of each silo's block goes into the mixture."""
    p = views(flat, shape)
    x = p["embedding"]
    for index in range(HIDDEN):
        x = functional.relu(functional.linear(x, p[f"hidden.{index}.weight"], p[f"hidden.{index}.bias"]))
    return torch.stack(
        [functional.relu(functional.linear(x, p[f"mix.{name}.weight"], p[f"mix.{name}.bias"])) for name in names]
    )


def shares(found: Tensor, allowed: Tensor) -> Tensor:
    """Scores [blocks, K] made to sum to 1 over the silos that may be mixed, bool [K]; equal ones where all are zero.

    All are zero once every ReLU of a block is dead, which would otherwise be the end of the silo's model.
    """
    kept = found * allowed
    total = kept.sum(1, keepdim=True)
    equal = (allowed / allowed.sum()).to(found.dtype).expand_as(found)
    return torch.where(total > 0, kept / total.clamp(min=torch.finfo(found.dtype).tiny), equal)


def mixed(weights: Tensor, models: Tensor, parts: Mapping[str, slice]) -> dict[str, Tensor]:
    """Personal blocks sum_j w_bj theta_j,b.

    Args:
        weights: [blocks, K] of :func:`shares`.
        models: [K, P] every silo's last model.
        parts: each block's range of P.
    """
    return {name: weights[row] @ models[:, part] for row, (name, part) in enumerate(parts.items())}


def gradient(
    flat: Tensor,
    shape: Layout,
    parts: Mapping[str, slice],
    *,
    models: Tensor,
    allowed: Tensor,
    direction: Tensor,
) -> Tensor:
    """The network's gradient (d theta~ / d phi)^T g [H]; zero where every ReLU is dead.

    Args:
        flat: phi [H].
        shape: its layout.
        parts: the branch's blocks.
        models: [K, P] what was mixed.
        allowed: bool [K].
        direction: g [P]; minus the silo's update descends.
    """
    # <g, theta~> depends on phi through the mixing weights alone: one number per block and silo is all that is needed.
    along = torch.stack([models[:, part] @ direction[part] for part in parts.values()])
    values = flat.clone().requires_grad_()
    total = (shares(scores(values, shape, list(parts)), allowed) * along).sum()
    if not total.requires_grad:
        return torch.zeros_like(flat)
    (found,) = torch.autograd.grad(total, values)
    return found
