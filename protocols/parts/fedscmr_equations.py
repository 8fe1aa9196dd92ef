"""FedSCMR's equations: the local loss in two common subspaces (1 to 8) and the contribution weights (9 to 13).

``norm`` selects one of two readings of the paper's matrix norms: ``row``, the mean of per-sample lengths as in the
public code of the cited base, which does not depend on the batch size; or ``frob``, Frobenius norms as printed.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from protocols.objectives.dscmr import mean_length, pair_likelihood

Norm = Literal["row", "frob"]


def distance(difference: Tensor, norm: Norm) -> Tensor:
    """Length of a difference of matrices [B, d]: mean of row lengths, or the Frobenius norm."""
    if norm == "row":
        return mean_length(difference)
    frobenius: Tensor = torch.linalg.vector_norm(difference)
    return frobenius


def label_loss(predicted: Tensor, labels: Tensor, norm: Norm) -> Tensor:
    """L_imd of one modality (eq 1) for predictions and multi-hot labels [B, C]; ``frob`` divides by B as printed."""
    length = distance(predicted - labels, norm)
    return length if norm == "row" else length / len(labels)


def discrimination(image: Tensor | None, text: Tensor | None, similar: Tensor, pairs: int) -> Tensor:
    """l_csd (eq 2) over S_V and S_T [B, d]: four pairs of modalities as printed, or three as in public code.

    Each summand is DSCMR's J2, with δ instead of its counts S.

    Args:
        image: None if the silo lacks images; pairs with images are left out.
        text: None if the silo lacks texts; pairs with texts are left out.
        similar: [B, B], 1 if two samples share a category; with three pairs, counts of shared labels.
        pairs: 4 for both orders of the cross-modal pair, or 3.
    """
    terms = [pair_likelihood(present, present, similar) for present in (image, text) if present is not None]
    if image is not None and text is not None:
        terms += [pair_likelihood(image, text, similar)]
        terms += [pair_likelihood(text, image, similar)] if pairs == 4 else []
    return torch.stack(terms).sum()


def consistency(image: Tensor, text: Tensor, image2: Tensor, text2: Tensor, norm: Norm) -> Tensor:
    """l_csc (eq 3): sum of the distances between the modalities in S and in S', all [B, d]."""
    return distance(image - text, norm) + distance(image2 - text2, norm)


def hinge(enhanced: Tensor, other: Tensor, same: Tensor, norm: Norm) -> Tensor:
    """max(0, |S' - S of the other modality| - |S' - S of the same modality|) (eqs 5 and 6), one value per batch."""
    return (distance(enhanced - other, norm) - distance(enhanced - same, norm)).clamp_min(0.0)


def cross_space(image: Tensor, text: Tensor, image2: Tensor, text2: Tensor, norm: Norm) -> Tensor:
    """L_ccs (eq 7): eq 5 for images plus eq 6 for captions."""
    return hinge(image2, text, image, norm) + hinge(text2, image, text, norm)


# --------------------------------------------------------------------------------------------- contribution weights
def proportion(samples: Tensor, labels: Tensor) -> Tensor:
    """Ω = (n_k / Σn)(c_k / Σc) (eq 10), [M]; not renormalised, as printed."""
    return samples / samples.sum() * (labels / labels.sum())


def progress(losses: Tensor) -> Tensor:
    """Ψ = exp(-l_k / mean l) (eq 11), [M]; all 1 if every loss is zero."""
    mean = losses.mean()
    return torch.exp(-losses / mean) if float(mean) > 0 else torch.ones_like(losses)


def quality(maps: Tensor) -> Tensor:
    """Φ = v_k / Σv (eq 12), [M]; uniform if every mAP is zero."""
    total = maps.sum()
    return maps / total if float(total) > 0 else torch.full_like(maps, 1 / len(maps))


def contribution(samples: Tensor, labels: Tensor, losses: Tensor, maps: Tensor, gamma: float) -> Tensor:
    """λ = softmax(Ω + Ψ + γ Φ) (eq 13), [M] float64, summing to 1."""
    return (proportion(samples, labels) + progress(losses) + gamma * quality(maps)).softmax(0)
