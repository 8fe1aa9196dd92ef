"""GreedyHash (Su et al. 2018): classify the binary codes themselves, a base FedHAP is compared on.

The classifier has no bias, is one for both modalities and is averaged with the network
(:class:`fedmq.models.hash_networks.SignHead`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor
from torch.nn import functional

from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.objectives import ObjectiveKind, TowerPlan
from protocols._options import check
from protocols.objectives._labelled import LabelledBatches, Samples


@dataclass(frozen=True)
class Options:
    """Options of GreedyHash.

    Args:
        alpha: weight of the penalty on codes that are not binary.
        power: of that penalty.
        multi_label: the target of a sample with several labels: all alike (``soft``), or the ``first`` alone, as the
            code FedHAP's baselines come from has it.
    """

    alpha: float = 0.1
    power: float = 3.0
    multi_label: Literal["soft", "first"] = "soft"

    def __post_init__(self) -> None:
        check("alpha", self.alpha, 0.0)
        check("power", self.power, 1.0)


def targets(labels: Tensor, multi_label: Literal["soft", "first"]) -> Tensor:
    """What the classifier shall give, [B, C]: shares that sum to 1, or 0 for a sample without a label."""
    if multi_label == "first":
        return labels * (labels.cumsum(1) == 1)
    return labels / labels.sum(1, keepdim=True).clamp_min(1)


def loss(codes: Tensor, logits: Tensor, labels: Tensor, options: Options) -> Tensor:
    """Cross-entropy of the binary codes' predictions plus alpha times mean ||u| - 1|^power.

    Args:
        codes: [B, r] codes u before the sign.
        logits: [B, C] of the binary codes, the gradient passed straight through the sign.
        labels: float [B, C], multi-hot.
        options: weight and targets.
    """
    entropy = functional.cross_entropy(logits, targets(labels, options.multi_label))
    return entropy + options.alpha * ((codes.abs() - 1).abs() ** options.power).mean()


def begin(options: Options, local: Local, context: Context, task: Task) -> LabelledBatches:
    """GreedyHash at work in one task; every silo can train it, with what it has."""

    def batch_loss(samples: Samples, generator: np.random.Generator) -> Tensor:
        if samples.logits is None:
            raise ValueError("GreedyHash's network has a classifier")
        return loss(samples.codes, samples.logits, samples.labels, options)

    return LabelledBatches(local, context.training.batch_size, batch_loss)


OBJECTIVE = ObjectiveKind(Options, begin, lambda options: TowerPlan(sign_head=True))
