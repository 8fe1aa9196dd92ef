"""DJSRH (Su et al. 2019): codes that reconstruct a joint similarity of both modalities, a base of FedUCH.

Needs no labels. A single-modality silo reconstructs the similarity within its modality. Its code trains AlexNet below
the codes. Here the image tower has a hidden layer over frozen features, and both towers have dropout before the code;
the code's text tower has none. Features are not centred: if all share a large mean, cosines are nearly equal
and the target carries little information.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedmq.config.sections import Fraction, NonNegative
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.objective_registry import ObjectiveKind
from protocols.parts.losses import cosines
from protocols.parts.similarity import RECONSTRUCTING_TOWERS, Reconstruction, affinity, mean_square


@dataclass(frozen=True)
class Options:
    """Options of DJSRH; defaults are its code's for MIRFlickr-25K (NUS-WIDE: beta 0.6; Wikipedia: all three 0.3).

    Args:
        beta: weight of the image similarity in the joint similarity, against 1 - beta for the text.
        eta: weight of the second-order similarity, against 1 - eta for the first-order one.
        mu: scale of the target.
        lambda1: weight of the image reconstruction.
        lambda2: weight of the text reconstruction.
    """

    beta: Fraction = 0.9
    eta: Fraction = 0.4
    mu: NonNegative = 1.5
    lambda1: NonNegative = 0.1
    lambda2: NonNegative = 0.1


def target(image: Tensor, text: Tensor, options: Options) -> Tensor:
    """S = mu [(1 - eta) S~ + eta S~ S~^T / B] with S~ = beta S_I + (1 - beta) S_T -> [B, B].

    Args:
        image: [B, d_i] features.
        text: [B, d_t] features.
        options: weights.
    """
    joint = options.beta * affinity(image) + (1 - options.beta) * affinity(text)
    return options.mu * ((1 - options.eta) * joint + options.eta * joint @ joint.T / len(image))


def loss(image: Tensor | None, text: Tensor | None, similar: Tensor, options: Options) -> Tensor:
    """lambda1 MSE(VV, S) + MSE(VT, S) + lambda2 MSE(TT, S), without the terms of a missing modality.

    Args:
        image: [B, r] codes; None if the silo has no images.
        text: [B, r] likewise.
        similar: [B, B] S.
        options: weights.
    """
    terms = []
    if image is not None:
        terms.append(options.lambda1 * mean_square(cosines(image, image), similar))
    if text is not None:
        terms.append(options.lambda2 * mean_square(cosines(text, text), similar))
    if image is not None and text is not None:
        terms.append(mean_square(cosines(image, text), similar))
    return torch.stack(terms).sum()


def begin(options: Options, local: Local, context: Context, task: Task) -> Reconstruction:
    """Start DJSRH for one task; single-modality silos train it on their modality."""
    return Reconstruction(local, context.training, partial(target, options=options), partial(loss, options=options))


OBJECTIVE = ObjectiveKind(Options, begin, lambda options: RECONSTRUCTING_TOWERS, needs_labels=False, on_features=True)
