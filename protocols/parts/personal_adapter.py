"""RCSR-p: a personal adapter on the embeddings that never leaves its silo (RCSR eqs 12 and 13)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedmq.federation.protocol import Context, Encoders, Local, Task, encoders_of
from fedmq.models.optimiser import FusedOptimiser
from fedmq.seeds import torch_generator
from protocols.parts import training
from protocols.parts.losses import unit

#: Name of the adapter among a silo's personal tensors: float32 [2, h, d], W1 and the transpose of W2.
STATE = "personal_adapter"
#: Initial standard deviation of W2; the paper says near zero.
_STD = 1e-3
#: Upper bound of the strength (eq 13).
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
    """Embeddings plus their correction, z + s_k A_k(z), [B, d], before normalisation (RCSR eq 12)."""
    return z + strength * correction(z, first, second)


def strength(lambda_p: float, weight: float) -> float:
    """s_k = min(lambda_p (1 + max(0, 1/2 - w_k)), 1/2) for a router weight w_k in [0, 1] (RCSR eq 13)."""
    return min(lambda_p * (1 + max(0.0, 0.5 - weight)), STRONGEST)


def initial(dim: int, hidden: int, generator: torch.Generator) -> Tensor:
    """Initial adapter float32 [2, h, d], nearly no correction: standard deviation 1/sqrt(d) for W1, 1e-3 for W2."""
    drawn = torch.randn(2, hidden, dim, generator=generator)
    return drawn * torch.tensor([1 / math.sqrt(dim), _STD]).view(2, 1, 1)


def embed(z: Tensor, adapter: Tensor, strength_: float) -> Tensor:
    """Personalised unit-length embeddings [B, d] from an adapter [2, h, d]."""
    return unit(corrected(z, adapter[0], adapter[1].T, strength_))


def kept(local: Local) -> dict[str, Tensor]:
    """The silo's adapter for its state; empty if it has none yet."""
    return {STATE: local.state[STATE]} if STATE in local.state else {}


def encoders(local: Local, strength_: float) -> Encoders:
    """Encoders of the silo's model with its adapter, if it has one, applied to both towers' outputs (RCSR eq 12)."""
    shared, adapter = encoders_of(local.model), local.state.get(STATE)
    if adapter is None:
        return shared
    return Encoders(
        lambda x: embed(shared.image(x).cpu(), adapter, strength_),
        lambda x: embed(shared.caption(x).cpu(), adapter, strength_),
    )


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning of an adapter.

    Args:
        hidden: width h.
        epochs: over the silo's samples, after each local training.
        rate: learning rate as a fraction of the round's.
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
    parts: Sequence[tuple[Local, Callable[[Tensor | None, Tensor | None], Tensor]]],
) -> Tensor:
    """Fine-tune the silo's adapter on its samples with the shared model frozen.

    Captions are drawn again in each epoch.

    Args:
        local: the silo; its model holds the locally trained parameters.
        context: optimiser and batch size.
        task: learning rate and seed.
        tuning: see :class:`Tuning`.
        strength_: s_k.
        parts: the silo's dataset, and its items that lack a modality, each with the loss of a batch's personalised
            embeddings.

    Returns:
        float32 [2, h, d].
    """
    old = local.state.get(STATE)
    seed = torch_generator(context.seed, "personal", local.silo.name)
    adapter = initial(context.dim, tuning.hidden, seed) if old is None else old.clone()
    steps = FusedOptimiser([adapter], context.training, task.learning_rate * tuning.rate)
    generator = training.generator_of(context, local, task, "personal")
    epochs = (part for _ in range(tuning.epochs) for part in parts)
    for part, loss in epochs:
        caption, least = training.choose_captions(part, generator), 1 + part.silo.paired
        for rows in training.batches(len(part.dataset), context.training.batch_size, generator, least):
            with torch.no_grad():
                pair = training.embed(part, rows, caption)
            leaf = adapter.clone().requires_grad_()
            value = loss(*(None if z is None else embed(z.cpu(), leaf, strength_) for z in pair))
            if not value.requires_grad:
                continue
            (adapter.grad,) = torch.autograd.grad(value, leaf)
            steps.step()
    return adapter
