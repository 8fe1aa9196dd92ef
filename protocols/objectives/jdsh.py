"""JDSH (Liu et al. 2020): codes that reconstruct a joint similarity stretched at both ends, a base of FedUCH.

Needs no labels. Its constants describe the distribution of similarities over the paper's whole training set; they are
not adapted to a silo's distribution. A single-modality silo reconstructs the similarity within its modality. The towers
are DJSRH's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedmq.config.sections import NonNegative
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.objective_registry import ObjectiveKind
from protocols.parts.losses import cosines
from protocols.parts.similarity import RECONSTRUCTING_TOWERS, Reconstruction, affinity, mean_square

#: A similarity of the stretched kind.
Signed = Annotated[float, Field(ge=-2.0, le=2.0)]


@dataclass(frozen=True)
class Options:
    """Options of JDSH; defaults are its code's for MIRFlickr-25K.

    For NUS-WIDE the code uses alpha 0.4, beta 0.3, lamb 0.3, low -0.64, high 0.75, left -0.62 with spread 0.0128, right
    -0.62 with spread 0.086, stretch_low 0.2.

    Args:
        alpha: weight of the image similarity in the joint similarity.
        beta: weight of the text similarity.
        lamb: weight of the product of both.
        mu: scale of the target.
        intra: weight of the reconstruction within a modality.
        low: smallest similarity.
        high: largest similarity.
        left: centre of the dissimilar pairs' distribution.
        left_spread: scale of the dissimilar pairs' distribution.
        a: entries below ``left - a * left_spread`` are stretched.
        right: centre of the similar pairs' distribution.
        right_spread: scale of the similar pairs' distribution.
        b: entries above ``right + b * right_spread`` are stretched.
        stretch_low: strength of the stretching below.
        stretch_high: strength of the stretching above.
    """

    alpha: NonNegative = 0.5
    beta: NonNegative = 0.1
    lamb: NonNegative = 0.4
    mu: NonNegative = 1.4
    intra: NonNegative = 0.1
    low: Signed = -0.52
    high: Signed = 0.68
    left: Signed = -0.49
    left_spread: NonNegative = 0.019
    a: NonNegative = 2.0
    right: Signed = -0.49
    right_spread: NonNegative = 0.088
    b: NonNegative = 4.0
    stretch_low: NonNegative = 0.1
    stretch_high: NonNegative = 0.2


def target(image: Tensor, text: Tensor, options: Options) -> Tensor:
    """S = mu times alpha S_I + beta S_T + lamb sym(S_I S_T^T), stretched at both ends -> [B, B].

    The upper end is selected after the lower one is stretched, as in the code.

    Args:
        image: [B, d_i] features.
        text: [B, d_t] features.
        options: weights, thresholds and stretching.
    """
    from_image, from_text = affinity(image), affinity(text)
    product = cosines(from_image, from_text)
    joint = options.alpha * from_image + options.beta * from_text + options.lamb * (product + product.T) / 2
    lower = joint < options.left - options.a * options.left_spread
    joint = torch.where(lower, (1 + options.stretch_low * torch.exp(options.low - joint)) * joint, joint)
    upper = joint > options.right + options.b * options.right_spread
    joint = torch.where(upper, (1 + options.stretch_high * torch.exp(joint - options.high)) * joint, joint)
    return options.mu * joint


def loss(image: Tensor | None, text: Tensor | None, similar: Tensor, options: Options) -> Tensor:
    """The sum of intra MSE(VV, S), MSE(VT, S) + MSE(VT^T, S) - mean diag VT, and intra MSE(TT, S).

    Terms of a missing modality are left out.

    Args:
        image: [B, r] codes; None if the silo has no images.
        text: [B, r] likewise.
        similar: [B, B] S.
        options: weights.
    """
    terms = [options.intra * mean_square(cosines(code, code), similar) for code in (image, text) if code is not None]
    if image is not None and text is not None:
        across = cosines(image, text)
        terms.append(mean_square(across, similar) + mean_square(across.T, similar) - across.diagonal().mean())
    return torch.stack(terms).sum()


def begin(options: Options, local: Local, context: Context, task: Task) -> Reconstruction:
    """Start JDSH for one task; single-modality silos train it on their modality."""
    return Reconstruction(local, context.training, partial(target, options=options), partial(loss, options=options))


OBJECTIVE = ObjectiveKind(Options, begin, lambda options: RECONSTRUCTING_TOWERS, needs_labels=False, on_features=True)
