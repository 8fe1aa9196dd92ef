"""DSPH (Huo et al., TCSVT 2023): codes are pulled toward learned proxies of their labels, on features of CLIP.

Each label c has a proxy p_c, which both modalities share and which is averaged with the network. With L_ic = 1 if item
i has label c, and codes h_i, each modality adds (official code, QinLab-WFU/DSPH)

mean over L_ic = 1 of 1 - cos(h_i, p_c), plus mean over L_ic = 0 of max(0, cos(h_i, p_c) - zeta),

and each pair of modalities (image-image, text-text, image-text) alpha times the mean of max(0, cos(h_i, h_j) - zeta)
over the items i, j that have several labels each and none in common.

The official code reads zeta from a spreadsheet, by r and the number of labels; we have not seen its values. Two codes
of r bits at Hamming distance d have cosine 1 - 2 d / r. The default 0 is that of Hadamard codes, which exist for r a
power of 2 and up to 2 r labels; for more labels per bit a larger zeta is needed.

Head and loss need no token sequences. The paper's head is one linear layer with tanh above CLIP, which is trained with
it; here the features are frozen, and a hidden layer stands between them and the head. Its dropout (rate 0.2)
before tanh is left out, and the scenario's optimiser trains the proxies too, for which the code has SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedmq.config.sections import NonNegative, Number
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from fedmq.models.two_tower import Out
from protocols.objectives.dscmr import logits_of
from protocols.parts.labelled import on_outputs, pairs_of, similar_items
from protocols.parts.losses import cosines
from protocols.parts.training import codes


@dataclass(frozen=True)
class Options:
    """Options of DSPH.

    Args:
        alpha: weight of the pairs of items without a common label.
        zeta: a code is pushed away from proxies of other labels, and from such items, whose cosine with it is above
            zeta.
    """

    alpha: NonNegative = 0.8
    zeta: Annotated[Number, Field(ge=-1.0, le=1.0)] = 0.0


def mean_over(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the entries of a matrix where ``chosen`` of the same shape is 1; 0 if there are none."""
    return (values * chosen).sum() / chosen.sum().clamp_min(1)


def proxy_loss(near: Tensor, labels: Tensor, zeta: float) -> Tensor:
    """The loss of one modality's cosines with the proxies [B, C], given labels float [B, C], multi-hot."""
    return mean_over(1 - near, labels) + mean_over((near - zeta).clamp_min(0), 1 - labels)


def pair_loss(image: Tensor | None, text: Tensor | None, labels: Tensor, zeta: float) -> Tensor:
    """The loss of items with several labels each and none in common, before ``alpha``.

    Args:
        image: codes [B, r]; None if the silo has no images.
        text: likewise.
        labels: float [B, C], multi-hot.
        zeta: see :class:`Options`.
    """
    several = (labels.sum(1) > 1).to(labels.dtype)
    apart = several[:, None] * several * (1 - similar_items(labels, labels))
    terms = [mean_over((cosines(a, b) - zeta).clamp_min(0), apart) for a, b in pairs_of(image, text)]
    return torch.stack(terms).sum()


def loss(options: Options, image: Out | None, text: Out | None, labels: Tensor) -> Tensor:
    """The loss of a batch.

    Args:
        options: weight and threshold.
        image: codes [B, r] in ``code``, cosines with the proxies [B, C] in ``logits``; None if the silo has no images.
        text: likewise.
        labels: float [B, C], multi-hot.
    """
    outs = [out for out in (image, text) if out is not None]
    near = torch.stack([proxy_loss(logits_of(out), labels, options.zeta) for out in outs]).sum()
    return near + options.alpha * pair_loss(*codes(image, text), labels, options.zeta)


OBJECTIVE = ObjectiveKind(Options, on_outputs(loss), lambda options: TowerPlan(tanh=True, shared_head="cosines"))
