"""DSCMR (Zhen et al. 2019): label discrimination in a common subspace, the base of FedSCMR and FedCMR.

J = J1 + alpha J2 + beta J3, with J1 the mean distance of predictions to labels in each modality, J2 the pairwise
likelihood over three pairs of modalities, and J3 the mean distance of an item's two embeddings. The means are over
rows, as in the released code; the paper prints Frobenius norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmq.config.sections import NonNegative
from fedmq.models.objective_registry import CommonSpacePlan, ObjectiveKind
from fedmq.models.two_tower import Out
from protocols.parts.labelled import on_outputs, pairs_of
from protocols.parts.losses import cosines, pair_nll


@dataclass(frozen=True)
class Options:
    """Options of DSCMR; defaults are the paper's.

    Args:
        alpha: weight of the pairwise likelihood J2; ignored by FedSCMR, which defines its own loss.
        beta: weight of the modality distance J3; ignored by FedSCMR.
        enhance: add FedSCMR's EnhanceNet; items are compared by its outputs. Only FedSCMR's loss terms train it: with
            them off, or under another method, only the optimiser's weight decay changes it.
        leaky: leaky ReLU after the common layer, as in FedCMR's network.
    """

    alpha: NonNegative = 1e-3
    beta: NonNegative = 1e-1
    enhance: bool = False
    leaky: bool = False


def mean_length(difference: Tensor) -> Tensor:
    """Mean row length of a difference of matrices [B, d], mean_i ||a_i - b_i||: J1 and J3."""
    rows: Tensor = torch.linalg.vector_norm(difference, dim=1)
    return rows.mean()


def pair_likelihood(a: Tensor, b: Tensor, similar: Tensor) -> Tensor:
    """J2 of one pair of modalities: mean over [B, B] of log(1 + e^Γ) - S Γ with Γ = cos(a_i, b_j) / 2.

    Args:
        a: [B, d].
        b: [B, d].
        similar: [B, B] S = L L^T, counts of shared labels.
    """
    return pair_nll(cosines(a, b) / 2, similar).mean()


def loss(image: Out | None, text: Out | None, labels: Tensor, options: Options) -> Tensor:
    """J = J1 + alpha J2 + beta J3 over the silo's modalities; J3 and the cross-modal pair need both.

    J1 is the distance between label predictions and labels, J3 that between the modalities' common features.

    Args:
        image: common features in ``raw`` [B, d], label predictions in ``logits`` [B, C]; None if not run.
        text: likewise.
        labels: float [B, C], multi-hot.
        options: weights.
    """
    present = [out for out in (image, text) if out is not None]
    similar = labels @ labels.T
    total = torch.stack([mean_length(logits_of(out) - labels) for out in present]).sum()
    if image is not None and text is not None:
        total = total + options.beta * mean_length(image.raw - text.raw)
    pairs = pairs_of(None if image is None else image.raw, None if text is None else text.raw)
    return total + options.alpha * torch.stack([pair_likelihood(a, b, similar) for a, b in pairs]).sum()


def logits_of(out: Out) -> Tensor:
    """A batch's label predictions [B, C].

    Raises:
        ValueError: the network is not DSCMR's.
    """
    if out.logits is None:
        raise ValueError("the network has no label head")
    return out.logits


def network(options: Options) -> CommonSpacePlan:
    """DSCMR's own network, or FedSCMR's and FedCMR's variants of it."""
    return CommonSpacePlan(enhance=options.enhance, leaky=options.leaky)


OBJECTIVE = ObjectiveKind(
    Options,
    on_outputs(lambda options, image, text, labels: loss(image, text, labels, options)),
    network,
    on_features=True,
)
