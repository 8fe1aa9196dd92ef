"""GreedyHash (Su et al. 2018): classification of the binary codes, a base in FedHAP's comparison.

Both modalities share one classifier without bias, which is averaged with the network
(:class:`fedmq.models.hash_networks.SharedHead`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedmq.config.sections import NonNegative, Positive
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from protocols.parts.labelled import Samples, on_samples


@dataclass(frozen=True)
class Options:
    """Options of GreedyHash.

    Args:
        alpha: weight of the penalty on codes that are not binary.
        power: exponent of that penalty.
        multi_label: target of a sample with several labels: all of them equally (``soft``), or only the ``first``, as
            in the code of FedHAP's baselines.
    """

    alpha: NonNegative = 0.1
    power: Annotated[Positive, Field(ge=1.0)] = 3.0
    multi_label: Literal["soft", "first"] = "soft"


def targets(labels: Tensor, multi_label: Literal["soft", "first"]) -> Tensor:
    """Target probabilities [B, C], which sum to 1; zero for a sample without labels."""
    if multi_label == "first":
        return labels * (labels.cumsum(1) == 1)
    return labels / labels.sum(1, keepdim=True).clamp_min(1)


def loss(codes: Tensor, logits: Tensor, labels: Tensor, options: Options) -> Tensor:
    """Cross-entropy of the binary codes' predictions plus alpha times mean ||u| - 1|^power.

    Args:
        codes: [B, r] codes u before the sign.
        logits: [B, C] of the binary codes, with a straight-through gradient at the sign.
        labels: float [B, C], multi-hot.
        options: weight and targets.
    """
    entropy = functional.cross_entropy(logits, targets(labels, options.multi_label))
    return entropy + options.alpha * ((codes.abs() - 1).abs() ** options.power).mean()


def _of_samples(options: Options, samples: Samples, generator: np.random.Generator) -> Tensor:
    if samples.logits is None:
        raise ValueError("GreedyHash needs a network with a classifier")
    return loss(samples.codes, samples.logits, samples.labels, options)


OBJECTIVE = ObjectiveKind(Options, on_samples(_of_samples), lambda options: TowerPlan(shared_head="signs"))
