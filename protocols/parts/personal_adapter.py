"""RCSR-p: a personal adapter on the embeddings that never leaves its silo (RCSR eqs 12 and 13)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedmq.config.sections import NonNegative, Passes, Positive, Whole, Width
from fedmq.federation.protocol import Context, Encoders, Local, Task, encoders_of
from fedmq.models.optimiser import FusedOptimiser
from fedmq.seeds import torch_generator
from protocols.parts import training
from protocols.parts.losses import unit

#: Name of the adapter among a silo's personal tensors: float32 [2, h, d], W1 and the transpose of W2.
STATE = "personal_adapter"
#: Datasets of a silo, each with the loss of a batch's personalised embeddings.
Parts = Sequence[tuple[Local, training.LossFunction]]
#: Initial standard deviation of W2; the paper says near zero.
_STD = 1e-3
#: Upper bound of the strength (eq 13).
STRONGEST = 0.5


@dataclass(frozen=True)
class AdapterOptions:
    """Options of personal adapters.

    Args:
        lambda_p: strength of personalisation; this and all ``personal_*`` options apply only with personal adapters.
        personal_onset: first round T_p in which adapters are fine-tuned.
        personal_hidden: hidden width of an adapter.
        personal_epochs: epochs of fine-tuning after each local training.
        personal_rate: learning rate of fine-tuning, as a fraction of the round's learning rate.
    """

    BEGINS: ClassVar[Mapping[str, str]] = {"personal_onset": "the fine-tuning of personal adapters"}

    lambda_p: Annotated[NonNegative, Field(le=STRONGEST)] = 0.2
    personal_onset: Annotated[Whole, Field(ge=0)] = 50
    personal_hidden: Width = 64
    personal_epochs: Passes = 1
    personal_rate: Positive = 0.1


def correction(z: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A_k(z) = W2 GELU(W1 z) of z [B, d], W1 [h, d], W2 [d, h]; one adapter for both modalities (RCSR, section 4.5)."""
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


def encoders(local: Local, strength_: float) -> Encoders:
    """Encoders of the silo's model with its adapter, if it has one, applied to both towers' outputs (RCSR eq 12)."""
    shared, adapter = encoders_of(local.model), local.state.get(STATE)
    if adapter is None:
        return shared
    return Encoders(
        lambda x: embed(shared.image(x).cpu(), adapter, strength_),
        lambda x: embed(shared.caption(x).cpu(), adapter, strength_),
    )


def tuned_or_kept(
    local: Local, context: Context, task: Task, options: AdapterOptions, strength_: Callable[[], float], parts: Parts
) -> dict[str, Tensor]:
    """The silo's adapter for its state, fine-tuned once personalisation has begun if there is anything to tune it on.

    Arguments as in :func:`fine_tuned`; the strength is computed only if it is needed.
    """
    if task.round < options.personal_onset or not parts:
        return {STATE: local.state[STATE]} if STATE in local.state else {}
    return {STATE: fine_tuned(local, context, task, options, strength_(), parts)}


def fine_tuned(
    local: Local, context: Context, task: Task, options: AdapterOptions, strength_: float, parts: Parts
) -> Tensor:
    """Fine-tune the silo's adapter, float32 [2, h, d], on its samples with the shared model frozen.

    The model holds the locally trained parameters. Captions are drawn again in each epoch. ``strength_`` is s_k; the
    parts are the silo's dataset, and its items that lack a modality, each with the loss of a batch's personalised
    embeddings.
    """
    old = local.state.get(STATE)
    seed = torch_generator(context.seed, "personal", local.silo.name)
    adapter = initial(context.dim, options.personal_hidden, seed) if old is None else old.clone()
    steps = FusedOptimiser([adapter], context.training, task.learning_rate * options.personal_rate)
    generator = training.generator_of(context, local, task, "personal")
    epochs = (part for _ in range(options.personal_epochs) for part in parts)
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
