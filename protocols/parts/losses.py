"""Loss functions that several methods share, one function per equation, and the options of InfoNCE.

Numbers refer to RCSR (Retrieval-Centric Semantic Routing) unless said otherwise. Tensors are of any float precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedmq.config.sections import Positive
from fedmq.errors import InputError
from fedmq.federation.protocol import Context

EPSILON = 1e-12
#: Global prototypes [d] of image and text; None of one that is not valid.
Shared = tuple[Tensor | None, Tensor | None]


def unit(x: Tensor) -> Tensor:
    """Rows of ``x`` [..., d] scaled to length 1; a zero row stays zero."""
    return functional.normalize(x, dim=-1, eps=EPSILON)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of rows [..., d] with rows [..., d] (broadcast), lengths clamped at 1e-12 -> [...]."""
    return (unit(a) * unit(b)).sum(-1)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row of ``a`` [A, d] with each row of ``b`` [B, d] -> [A, B]."""
    return unit(a) @ unit(b).T


def pair_nll(theta: Tensor, similar: Tensor) -> Tensor:
    """Negative log-likelihood log(1 + e^theta) - S theta of each pair, of any shape."""
    loss: Tensor = functional.softplus(theta) - similar * theta
    return loss


def nothing(image: Tensor | None, text: Tensor | None) -> Tensor:
    """Zero, the base loss of items that are trained on a method's further terms alone."""
    return torch.zeros(())


def info_nce(image: Tensor, text: Tensor, tau: float) -> Tensor:
    """Symmetric InfoNCE over a batch (RCSR eq 2); exactly 0 for a batch of one.

    Args:
        image: [B, d] unit-length image embeddings.
        text: [B, d] unit-length text embeddings, row i the caption of image i.
        tau: temperature.
    """
    scores = image @ text.T / tau
    return (0.5 * (scores.logsumexp(1) + scores.logsumexp(0)) - scores.diagonal()).mean()


def anchor(z: Tensor, missing: Tensor) -> Tensor:
    """Anchoring loss of a single-modality silo towards the prototype of the modality it lacks (RCSR eq 3).

    It is minimal when all rows of ``z`` collapse onto one vector, so its weight should be modest.

    Args:
        z: [B, d] embeddings of the modality the silo has.
        missing: [d] global prototype of the other one.
    """
    return 1 - cosine(z, missing).mean()


def nearest_anchor(z: Tensor, missing: Tensor) -> Tensor:
    """RCSR's eq 3 with several prototypes [J, d], not in the paper: pulls each row of z [B, d] to its nearest one."""
    return 1 - (unit(z) @ unit(missing).T).amax(1).mean()


def prototype_regulariser(pairs: Sequence[tuple[Tensor, Tensor]], lambda_a: float) -> Tensor:
    """First term of RCSR eq 4: (lambda_a / 2) * sum over available modalities of 1 - cos(local [d], global [d]).

    There is at least one pair of prototypes.
    """
    distances = [1 - cosine(local, shared) for local, shared in pairs]
    return 0.5 * lambda_a * torch.stack(distances).sum()


def proximal(drift: Tensor, lambda_s: float) -> Tensor:
    """Second term of RCSR eq 4 as printed: lambda_s * ||drift||^2, drift [P] = theta - base."""
    length: Tensor = torch.linalg.vector_norm(drift)
    return lambda_s * length.square()


def proximal_gradient(drift: Tensor, lambda_s: float) -> Tensor:
    """Gradient of :func:`proximal` [P], computed in place in ``drift``; cheaper than autograd."""
    return drift.mul_(2 * lambda_s)


def local_prototype(z: Tensor) -> Tensor:
    """Unit-length mean of embeddings [n, d] -> [d] (RCSR eq 6)."""
    return unit(z.mean(0))


def rcsr_loss(
    image: Tensor | None,
    text: Tensor | None,
    *,
    shared: Shared,
    tau: float,
    lambda_anc: float,
    lambda_a: float,
    anchored: bool,
    aligned: bool,
    centroids: Tensor | None = None,
) -> Tensor:
    """Eq 5 without its proximal term: InfoNCE or anchoring, plus the prototype regulariser, for one batch.

    Args:
        image: [B, d] embeddings; None if the silo has no images.
        text: [B, d] likewise.
        shared: global prototypes.
        tau: temperature.
        lambda_anc: weight of the anchoring loss.
        lambda_a: weight of the regulariser.
        anchored: whether a single-modality silo is anchored.
        aligned: whether to add the regulariser; its local prototype is the batch's (our choice).
        centroids: [J, d] to anchor samples to; None uses the prototype of the missing modality.
    """
    terms: list[Tensor] = []
    if image is not None and text is not None:
        terms.append(info_nce(image, text, tau))
    elif anchored:
        held, missing = (image, shared[1]) if image is not None else (text, shared[0])
        if held is not None and centroids is not None:
            terms.append(lambda_anc * nearest_anchor(held, centroids))
        elif held is not None and missing is not None:
            terms.append(lambda_anc * anchor(held, missing))
    if aligned:
        pairs = [
            (local_prototype(z), target)
            for z, target in zip((image, text), shared, strict=True)
            if z is not None and target is not None
        ]
        terms.append(prototype_regulariser(pairs, lambda_a))
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


@dataclass(frozen=True)
class TauOptions:
    """The option of methods that train InfoNCE.

    Args:
        tau: temperature of InfoNCE; applies to the base ``info_nce`` only.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {"objective.base=info_nce": ("tau",)}

    tau: Positive = 0.07


def refuse_other_bases(protocol: str, context: Context) -> None:
    """Reject every base loss but ``info_nce``, for methods that define their own variant of it.

    Raises:
        InputError: the scenario's objective has another base.
    """
    base = context.objective.base
    if base != "info_nce":
        raise InputError("objective.base", base, f"info_nce, the base that {protocol}'s loss is a variant of")
