"""RCSR-p: a personal adapter on the embeddings that never leaves its silo (RCSR eqs 12 and 13)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedmq.federation.protocol import Context, Encoders, Local, Task, encoders_of
from fedmq.models.optimiser import FusedOptimiser
from fedmq.seeds import torch_generator
from protocols import _training
from protocols._losses import unit

#: Name of the adapter among a silo's personal tensors: float32 [2, h, d], W1 and the transpose of W2.
STATE = "personal_adapter"
#: Initial standard deviation of W2; the paper says near zero.
_STD = 1e-3
#: Strength never exceeds this (eq 13).
STRONGEST = 0.5


def correction(z: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A_k(z) = W2 GELU(W1 z), the same adapter for both modalities (RCSR, section 4.5).

    Args:
        z: [B, d] embeddings.
        first: W1 [h, d].
        second: W2 [d, h].
    """
    change: Tensor = functional.gelu(z @ first.T) @ second.T
    return change


def corrected(z: Tensor, first: Tensor, second: Tensor, strength: float) -> Tensor:
    """Embeddings plus their correction, z + s_k A_k(z), [B, d], not yet of unit length (RCSR eq 12)."""
    return z + strength * correction(z, first, second)


def strength(lambda_p: float, weight: float) -> float:
    """s_k = min(lambda_p (1 + max(0, 1/2 - w_k)), 1/2) for a router weight w_k in [0, 1] (RCSR eq 13)."""
    return min(lambda_p * (1 + max(0.0, 0.5 - weight)), STRONGEST)


def initial(dim: int, hidden: int, generator: torch.Generator) -> Tensor:
    """An adapter that begins as nearly no correction, float32 [2, h, d]: W1 of deviation 1/sqrt(d), W2 of 1e-3."""
    drawn = torch.randn(2, hidden, dim, generator=generator)
    return drawn * torch.tensor([1 / math.sqrt(dim), _STD]).view(2, 1, 1)


def embed(z: Tensor, adapter: Tensor, strength_: float) -> Tensor:
    """Personalised embeddings of unit length, [B, d], by an adapter [2, h, d]."""
    return unit(corrected(z, adapter[0], adapter[1].T, strength_))


def kept(local: Local) -> dict[str, Tensor]:
    """The silo's adapter as it is; nothing where there is none yet."""
    return {STATE: local.state[STATE]} if STATE in local.state else {}


def encoders(local: Local, strength_: float) -> Encoders:
    """The model that the silo holds, with its own adapter behind both towers (RCSR eq 12); without one, as it is."""
    shared, adapter = encoders_of(local.model), local.state.get(STATE)
    if adapter is None:
        return shared
    return Encoders(
        lambda x: embed(shared.image(x).cpu(), adapter, strength_),
        lambda x: embed(shared.caption(x).cpu(), adapter, strength_),
    )


@dataclass(frozen=True)
class Tuning:
    """How an adapter is fine-tuned.

    Args:
        hidden: width h.
        epochs: over the silo's samples, after each local training.
        rate: share of the round's learning rate.
    """

    hidden: int
    epochs: int
    rate: float


def fine_tuned(
    local: Local,
    context: Context,
    task: Task,
    tuning: Tuning,
    strength_: float,
    loss: Callable[[Tensor | None, Tensor | None], Tensor],
) -> Tensor:
    """The silo's adapter after fine-tuning on its own samples, the shared model standing still.

    Only the adapter moves: the shared model's embeddings, of captions drawn anew in each epoch, have no gradient.

    Args:
        local: the silo; its model holds what local training gave.
        context: optimiser and batch size.
        task: learning rate, and the seed of the order.
        tuning: see there.
        strength_: s_k.
        loss: of a batch's personalised embeddings.

    Returns:
        float32 [2, h, d].
    """
    old = local.state.get(STATE)
    seed = torch_generator(context.seed, "personal", local.silo.name)
    adapter = initial(context.dim, tuning.hidden, seed) if old is None else old.clone()
    steps = FusedOptimiser([adapter], context.training, task.learning_rate * tuning.rate)
    generator = _training.generator_of(context, local, task, "personal")
    size = len(local.share)
    for _ in range(tuning.epochs):
        caption = _training.choose_captions(local, generator)
        for rows in _training.batches(size, context.training.batch_size, generator):
            with torch.no_grad():
                pair = _training.embed(local, rows, caption)
            leaf = adapter.clone().requires_grad_()
            value = loss(*(None if z is None else embed(z.cpu(), leaf, strength_) for z in pair))
            if not value.requires_grad:
                continue
            (adapter.grad,) = torch.autograd.grad(value, leaf)
            steps.step()
    return adapter
