"""PLFedCMH's hypernetworks at the coordinator: per silo and branch, weights for mixing all silos' layers.

A hypernetwork is an embedding, three ReLU layers and one linear layer per block of the model, all in one flat buffer.
Its gradient comes from the silo's update of the mixed model it received.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedmq.wire.layout import Layout
from protocols.parts.router import views

#: Width of the embedding and of the hidden layers.
WIDTH = 32
HIDDEN = 3


def blocks(layout: Layout, part: slice) -> dict[str, slice]:
    """Blocks of a branch as ranges of the model's flat buffer; a block is one layer's weight and bias.

    Args:
        layout: layout of the model.
        part: the branch's range.
    """
    slices: dict[str, slice] = {}
    offset = 0
    for entry in layout.entries:
        end = offset + entry.size
        if part.start <= offset < part.stop:
            owner = entry.name.rpartition(".")[0]
            start = slices[owner].start if owner in slices else offset
            slices[owner] = slice(start, end)
        offset = end
    return slices


def layout(names: Sequence[str], silos: int) -> Layout:
    """Names and shapes of one network's parameters.

    Args:
        names: names of the blocks.
        silos: K, number of silos.
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
    """Unnormalised mixing weights a [blocks, K], at least 0."""
    p = views(flat, shape)
    x = p["embedding"]
    for index in range(HIDDEN):
        x = functional.relu(functional.linear(x, p[f"hidden.{index}.weight"], p[f"hidden.{index}.bias"]))
    return torch.stack(
        [functional.relu(functional.linear(x, p[f"mix.{name}.weight"], p[f"mix.{name}.bias"])) for name in names]
    )


def shares(raw: Tensor, allowed: Tensor) -> Tensor:
    """Scores [blocks, K] normalised to sum to 1 over the silos ``allowed``, bool [K]; equal weights if all are zero.

    A block's scores are all zero once its ReLUs are dead; without the equal weights the silo's model would become zero.
    """
    kept = raw * allowed
    total = kept.sum(1, keepdim=True)
    equal = (allowed / allowed.sum()).to(raw.dtype).expand_as(raw)
    return torch.where(total > 0, kept / total.clamp(min=torch.finfo(raw.dtype).tiny), equal)


def mixed(weights: Tensor, models: Tensor, parts: Mapping[str, slice]) -> dict[str, Tensor]:
    """Personal blocks sum_j w_bj theta_j,b.

    Args:
        weights: [blocks, K] of :func:`shares`.
        models: [K, P] the last model of every silo.
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
        models: [K, P] the mixed models.
        allowed: bool [K], silos that may be mixed.
        direction: g [P]; the negative of the silo's update for descent.
    """
    # <g, theta~> depends on phi only through the mixing weights, so one number per block and silo suffices.
    along = torch.stack([models[:, part] @ direction[part] for part in parts.values()])
    values = flat.clone().requires_grad_()
    total = (shares(scores(values, shape, list(parts)), allowed) * along).sum()
    if not total.requires_grad:
        return torch.zeros_like(flat)
    (result,) = torch.autograd.grad(total, values)
    return result
