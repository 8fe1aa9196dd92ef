"""FedSCMR's equations: the local loss in two common subspaces (1 to 8) and the contribution weights (9 to 13).

``norm`` chooses between two readings of the printed matrix norms: ``row``, the mean over samples of per-sample lengths,
as the public code of the cited base has it and as does not depend on the batch size; ``frob``, Frobenius norms as
printed.
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
    whole: Tensor = torch.linalg.vector_norm(difference)
    return whole


def label_loss(predicted: Tensor, labels: Tensor, norm: Norm) -> Tensor:
    """L_imd of one modality (eq 1) for predictions and multi-hot labels [B, C]; ``frob`` divides by B as printed."""
    length = distance(predicted - labels, norm)
    return length if norm == "row" else length / len(labels)


def discrimination(image: Tensor | None, text: Tensor | None, similar: Tensor, pairs: int) -> Tensor:
    """l_csd (eq 2) over S_V and S_T [B, d]: four pairs of modalities as printed, or three as public code has it.

    Each summand is DSCMR's J2, with δ for its counts S.

    Args:
        image: None where the silo lacks images; its pairs are left out.
        text: likewise.
        similar: [B, B], 1 where two samples share a category; public code, with three pairs, counts shared labels.
        pairs: 4, the cross pair twice, or 3.
    """
    terms = [pair_likelihood(held, held, similar) for held in (image, text) if held is not None]
    if image is not None and text is not None:
        terms += [pair_likelihood(image, text, similar)]
        terms += [pair_likelihood(text, image, similar)] if pairs == 4 else []
    return torch.stack(terms).sum()


def consistency(image: Tensor, text: Tensor, image2: Tensor, text2: Tensor, norm: Norm) -> Tensor:
    """l_csc (eq 3): the modalities' distance in S and in S', all [B, d]."""
    return distance(image - text, norm) + distance(image2 - text2, norm)


def hinge(enhanced: Tensor, other: Tensor, same: Tensor, norm: Norm) -> Tensor:
    """max(0, |S' - S of the other modality| - |S' - S of its own|) (eqs 5 and 6): one number per batch, no margin."""
    return (distance(enhanced - other, norm) - distance(enhanced - same, norm)).clamp_min(0.0)


def cross_space(image: Tensor, text: Tensor, image2: Tensor, text2: Tensor, norm: Norm) -> Tensor:
    """L_ccs (eq 7): eq 5 for images plus eq 6 for captions."""
    return hinge(image2, text, image, norm) + hinge(text2, image, text, norm)


# --------------------------------------------------------------------------------------------- contribution weights
def proportion(samples: Tensor, labels: Tensor) -> Tensor:
    """Ω = (n_k / Σn)(c_k / Σc) (eq 10), [M]; not renormalised, as printed."""
    return samples / samples.sum() * (labels / labels.sum())


def progress(losses: Tensor) -> Tensor:
    """Ψ = exp(-l_k / mean l) (eq 11), [M]; 1 for all where every loss is zero."""
    mean = losses.mean()
    return torch.exp(-losses / mean) if float(mean) > 0 else torch.ones_like(losses)


def quality(maps: Tensor) -> Tensor:
    """Φ = v_k / Σv (eq 12), [M]; uniform where every mAP is zero."""
    total = maps.sum()
    return maps / total if float(total) > 0 else torch.full_like(maps, 1 / len(maps))


def contribution(samples: Tensor, labels: Tensor, losses: Tensor, maps: Tensor, gamma: float) -> Tensor:
    """λ = softmax(Ω + Ψ + γ Φ) (eq 13), [M] float64, summing to 1."""
    return (proportion(samples, labels) + progress(losses) + gamma * quality(maps)).softmax(0)
