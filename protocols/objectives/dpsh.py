"""DPSH (Li et al. 2016): pairwise likelihood against all the silo's codes, a base in FedHAP's comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import NonNegative
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.hash_networks import signs
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from fedmq.models.two_tower import Out
from protocols.parts import alternating, training
from protocols.parts.labelled import Samples, samples_of, similar_items
from protocols.parts.losses import pair_nll

_BANK = "base.bank"


@dataclass(frozen=True)
class Options:
    """Options of DPSH.

    Args:
        alpha: weight of the quantisation loss.
    """

    alpha: NonNegative = 0.1


def loss(codes: Tensor, labels: Tensor, bank: Tensor, bank_labels: Tensor, alpha: float) -> Tensor:
    """Mean over all pairs of log(1 + e^θ) - s θ with θ = u U^T / 2, plus alpha times mean (u - sign u)^2.

    Args:
        codes: [B, r] codes u.
        labels: float [B, C], multi-hot.
        bank: [N, r] last codes U of all the silo's samples, the batch's included.
        bank_labels: float [N, C].
        alpha: weight.
    """
    likelihood = pair_nll(0.5 * codes @ bank.T, similar_items(labels, bank_labels))
    return likelihood.mean() + alpha * (codes - signs(codes.detach())).square().mean()


@dataclass(frozen=True)
class Dpsh(training.Work):
    """DPSH in one task: one step per batch, against a bank that is kept between tasks."""

    local: Local  # the silo
    batch_size: int  # the scenario's batch size
    alpha: float  # weight of the quantisation loss
    # Float32 [m, n, r], the last codes of each modality's samples; rows without codes yet are zero, which gives no
    # gradient. Updated in place.
    bank: Tensor

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[training.Step]:
        """One step per batch of a permutation."""
        caption = training.choose_captions(self.local, generator)
        bank_labels = training.labels_of(self.local, np.arange(len(self.local.dataset))).repeat(len(self.bank), 1)
        for rows in training.batches(len(self.local.dataset), self.batch_size, generator):
            labels = training.labels_of(self.local, rows)

            def batch_loss(
                image: Out | None, text: Out | None, labels: Tensor = labels, rows: training.I64 = rows
            ) -> Tensor:
                samples = samples_of(image, text, labels)
                self._store(samples, rows)
                return loss(samples.codes, samples.labels, self.bank.flatten(0, 1), bank_labels, self.alpha)

            yield training.Step(rows, caption, batch_loss)

    def _store(self, samples: Samples, rows: training.I64) -> None:
        index = torch.from_numpy(rows).to(self.bank.device)
        self.bank[:, index] = samples.codes.detach().view(len(self.bank), len(rows), -1)

    def kept(self) -> Mapping[str, Tensor]:
        """The bank of each modality and the rows of its items."""
        codes = [codes.clone() for codes in self.bank]
        return alternating.kept(self.local, _BANK, dict(zip(alternating.modalities_of(self.local), codes, strict=True)))


def begin(options: Options, local: Local, context: Context, task: Task) -> Dpsh:
    """Start DPSH for one task; single-modality silos train it on their modality.

    The bank of an earlier task is discarded if the silo's items have changed, as after a scenario's drift.
    """
    modalities = alternating.modalities_of(local)
    bank = torch.zeros(len(modalities), len(local.dataset), context.dim)
    if alternating.same_items(local, _BANK):
        for codes, modality in zip(bank, modalities, strict=True):
            if (old := local.state.get(f"{_BANK}.{modality}")) is not None:
                codes.copy_(old)
    return Dpsh(local, context.training.batch_size, options.alpha, bank.to(local.model.flat.device))


OBJECTIVE = ObjectiveKind(Options, begin, lambda options: TowerPlan())
