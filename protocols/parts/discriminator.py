"""FedHAP's discriminator: distinguishes silos' codes of a class from the class's global prototype (eq 8).

Two layers over [code ; label vector], in a flat buffer with a separate layout. Every process draws its initial
parameters from the run's seed; only the change from them is sent.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedmq.config.scenario import Training
from fedmq.models.hash_networks import initial_parameters
from fedmq.models.objective_registry import TowerPlan
from fedmq.models.optimiser import FusedOptimiser
from fedmq.wire.layout import Layout

Eq8 = Literal["corrected", "printed"]
Adversarial = Literal["nonsat", "minimax", "literal"]


def layout_of(bits: int, classes: int, hidden: int) -> Layout:
    """Parameters of the discriminator: r + C inputs, a ReLU layer of width ``hidden``, one output."""
    shapes: dict[str, tuple[int, ...]] = {
        "discriminator.hidden.weight": (hidden, bits + classes),
        "discriminator.hidden.bias": (hidden,),
        "discriminator.output.weight": (1, hidden),
        "discriminator.output.bias": (1,),
    }
    return Layout.of((name, shape, "float32") for name, shape in shapes.items())


def initial(layout: Layout, seed: int) -> Tensor:
    """Initial parameters float32 [Q], distributed as those of torch's linear layer."""
    return initial_parameters(layout, TowerPlan(), seed)


def logits(theta: Tensor, layout: Layout, codes: Tensor, labels: Tensor) -> Tensor:
    """Log-odds [B] that codes [B, r] with label vectors [B, C] are prototypes; D is their logistic function.

    Args:
        theta: [Q] parameters.
        layout: layout of the discriminator.
        codes: [B, r].
        labels: [B, C].
    """
    parts = torch.split(theta, [entry.size for entry in layout.entries])
    w1, b1, w2, b2 = (part.view(entry.shape) for part, entry in zip(parts, layout.entries, strict=True))
    hidden = functional.relu(functional.linear(torch.cat([codes, labels], 1), w1, b1))
    return functional.linear(hidden, w2, b2)[:, 0]


def label_vectors(labels: Tensor) -> Tensor:
    """Labels [B, C] normalised to sum to 1 per sample; zero for a sample without labels."""
    return labels / labels.sum(1, keepdim=True).clamp_min(1)


def discriminator_loss(local: Tensor, prototypes: Tensor, eq8: Eq8 = "corrected") -> Tensor:
    """Cross-entropy with local codes as 0 and prototypes as 1 (eq 8), from log-odds [B] and [C].

    The paper prints 1 - log D instead of log(1 - D); that loss falls when D mistakes local codes for prototypes, so it
    cannot train D.
    """
    real = functional.softplus(-prototypes).mean()
    if eq8 == "printed":
        return real - (1 + functional.softplus(-local)).mean()
    return functional.softplus(local).mean() + real


def generator_loss(local: Tensor, prototypes: Tensor, kind: Adversarial, eq8: Eq8 = "corrected") -> Tensor:
    """Adversarial loss of the hashing network, from the discriminator's log-odds [B] and [C].

    Args:
        local: log-odds of the batch's codes.
        prototypes: log-odds of the prototypes.
        kind: ``nonsat`` is -mean log D, ``minimax`` mean log(1 - D); ``literal`` takes L_d itself, as algorithm 1 does,
            which trains the network to help the discriminator.
        eq8: the form of L_d.
    """
    match kind:
        case "nonsat":
            return functional.softplus(-local).mean()
        case "minimax":
            return -functional.softplus(local).mean()
        case "literal":
            return discriminator_loss(local, prototypes, eq8)


class Discriminator:
    """A discriminator in local training, with its optimiser.

    Args:
        theta: float32 [Q] initial parameters; not modified.
        layout: layout of the discriminator.
        prototypes: [V, r] valid global prototypes.
        prototype_labels: [V, C] their one-hot labels.
        training: kind of optimiser and weight decay.
        learning_rate: learning rate of this round.
    """

    def __init__(
        self,
        theta: Tensor,
        layout: Layout,
        prototypes: Tensor,
        prototype_labels: Tensor,
        training: Training,
        learning_rate: float,
    ) -> None:
        self.theta = theta.clone()
        self._layout = layout
        self._prototypes, self._prototype_labels = prototypes, prototype_labels
        self._optimiser = FusedOptimiser([self.theta], training, learning_rate)

    def step(self, codes: Tensor, labels: Tensor, eq8: Eq8) -> None:
        """Take one optimiser step on eq 8 for binary codes [B, r] and label vectors [B, C]."""
        theta = self.theta.clone().requires_grad_()
        lost = discriminator_loss(self._logits(theta, codes, labels), self._real(theta), eq8)
        (self.theta.grad,) = torch.autograd.grad(lost, theta)
        self._optimiser.step()

    def fooled(self, codes: Tensor, labels: Tensor, kind: Adversarial, eq8: Eq8) -> Tensor:
        """The hashing network's adversarial loss for codes [B, r], with the discriminator frozen."""
        return generator_loss(self._logits(self.theta, codes, labels), self._real(self.theta), kind, eq8)

    def _logits(self, theta: Tensor, codes: Tensor, labels: Tensor) -> Tensor:
        return logits(theta, self._layout, codes, labels)

    def _real(self, theta: Tensor) -> Tensor:
        return self._logits(theta, self._prototypes, self._prototype_labels)
