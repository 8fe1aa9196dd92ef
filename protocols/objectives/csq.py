"""CSQ (Yuan et al. 2020): pull codes to their class's hash centre, a base in FedHAP's comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmq.config.sections import NonNegative
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from fedmq.seeds import numpy_generator
from protocols.parts.labelled import EveryLabelledBatch, Samples, on_samples

#: Maximum draws of random centres; the best draw is used.
_DRAWS = 20


@dataclass(frozen=True)
class Options:
    """Options of CSQ.

    Args:
        lamb: weight of the quantisation loss.
    """

    lamb: NonNegative = 1e-4


def hash_centres(classes: int, bits: int, generator: np.random.Generator) -> Tensor:
    """A centre in {-1, 1}^r for each of C classes, float32 [C, r]; the generator must be the same at all silos.

    If r is a power of two and C <= 2 r, the first rows of [H; -H] with Sylvester's Hadamard matrix H. Otherwise, as for
    12, 24 and 48 bits, random balanced vectors, drawn again until any two differ in more than r / 4 bits. If no draw
    achieves that, as for 80 classes in 12 bits, centres are at least distinct, if there are enough balanced vectors.
    """
    if bits & (bits - 1) == 0 and classes <= 2 * bits:
        from scipy.linalg import hadamard  # noqa: PLC0415 - a tenth of the imports of every run

        matrix = torch.from_numpy(hadamard(bits, dtype=np.float32))
        return torch.cat([matrix, -matrix])[:classes]
    balanced = np.where(np.arange(bits) % 2 == 0, 1.0, -1.0).astype(np.float32)
    best, farthest = np.zeros((0, bits), np.float32), -1.0
    for _ in range(_DRAWS):
        drawn = generator.permuted(np.tile(balanced, (classes, 1)), axis=1)
        apart = (bits - drawn @ drawn.T) / 2
        nearest = float(np.min(apart + bits * np.eye(classes)))
        if nearest > farthest:
            best, farthest = drawn, nearest
        if farthest > bits / 4:
            break
    while farthest == 0 and classes <= math.comb(bits, bits // 2):
        first = np.sort(np.unique(best, axis=0, return_index=True)[1])
        again = np.setdiff1d(np.arange(classes), first)
        if not len(again):
            break
        best[again] = generator.permuted(np.tile(balanced, (len(again), 1)), axis=1)
    return torch.from_numpy(best)


def tie_break(bits: int, generator: np.random.Generator) -> Tensor:
    """Tie-breaking vector for bits on which a sample's labels disagree evenly, float32 [r] in {-1, 1}."""
    return torch.from_numpy(np.where(generator.random(bits) < 0.5, 1.0, -1.0).astype(np.float32))


def loss(codes: Tensor, labels: Tensor, centres: Tensor, ties: Tensor, options: Options) -> Tensor:
    """Cross-entropy of (tanh u + 1) / 2 with (c + 1) / 2 plus lamb times mean (|tanh u| - 1)^2.

    Args:
        codes: [B, r] codes u before tanh.
        labels: float [B, C], multi-hot.
        centres: [C, r]; c is the sign of the sum of its labels' centres.
        ties: [r], c where that sum is 0.
        options: weight.
    """
    total = labels @ centres
    target = (torch.where(total == 0, ties, total.sign()) + 1) / 2
    # (tanh u + 1) / 2 is the logistic function of 2u; with logits no logarithm of 0 occurs.
    entropy = functional.binary_cross_entropy_with_logits(2 * codes, target)
    return entropy + options.lamb * (codes.tanh().abs() - 1).square().mean()


def begin(options: Options, local: Local, context: Context, task: Task) -> EveryLabelledBatch:
    """Start CSQ for one task; single-modality silos train it on their modality."""
    classes, device = len(context.label_names), local.model.flat.device
    # Seeded by C and r only, not by the run's seed, so that runs with different seeds use the same centres.
    drawing = numpy_generator(0, "csq", classes, context.dim)
    centres = hash_centres(classes, context.dim, drawing).to(device)
    ties = tie_break(context.dim, drawing).to(device)

    def of_samples(options: Options, samples: Samples, generator: np.random.Generator) -> Tensor:
        return loss(samples.codes, samples.labels, centres, ties, options)

    return on_samples(of_samples)(options, local, context, task)


OBJECTIVE = ObjectiveKind(Options, begin, lambda options: TowerPlan())
