"""CreamFL (our reading): FedAvg with contrasts with global and previous local embeddings (Yu et al., 2023).

The original exchanges representations of a public set (``creamfl_public``). This is the variant of RCSR's comparison:
one architecture, averaged parameters, no public data. RCSR specifies the contrast, a moving average of global features
with decay 0.9, and a distillation weight of 0.3; the rest is our reading. A silo keeps, for each sample and modality, a
moving average of the downloaded models' embeddings. This bank replaces the global representations of the public set: it
is the target of the contrasts between and within modalities and of the distillation, and never leaves the silo. A silo
with one modality trains the contrast within it and the distillation.

The contrasts are those of the paper and of its code (FLAIR-THU/CreamFL, ``MMClientTrainer``): the inter-modal one is
summed over both directions, the intra-modal one is the mean over a silo's modalities, and both have weight 0.5.
Departures: the bank replaces the public set; the temperature is that of RCSR's comparison, 0.07, where the paper has
0.5; and silos distil, where the paper's coordinator does. The paper trains five local epochs a task:
``training.local_epochs: 5``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedmq.config.sections import Fraction, NonNegative, Positive
from fedmq.encoders.base import MODALITIES
from fedmq.federation.protocol import Local, Task, Trained, Traits, take
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import Model
from protocols import fedavg
from protocols.parts import personal_model, training
from protocols.parts.aggregation import as_tensor
from protocols.parts.losses import unit

#: Names in the silo state: the bank, embeddings by the last local model, and the rows of the samples of both.
BANK, LAST, ROWS = "creamfl_bank_", "creamfl_last_", "creamfl_rows"


@dataclass(frozen=True)
class CreamFlOptions(fedavg.AnchoredOptions):
    """Options of CreamFL, in addition to those of FedAvg.

    Args:
        inter: weight of the contrast with the other modality's global embeddings.
        intra: weight of the contrast of the global embedding against the previous local one.
        contrast_tau: temperature of both contrasts.
        kd: weight of the distillation, the mean squared distance to the global embeddings.
        bank_ema: decay of the bank: fraction of a sample's old global embedding kept at each download.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **fedavg.AnchoredOptions.OF,
        "inter|intra": ("contrast_tau",),
        "inter|intra|kd": ("bank_ema",),
    }

    inter: NonNegative = 0.5
    intra: NonNegative = 0.5
    contrast_tau: Positive = 0.07
    kd: NonNegative = 0.3
    bank_ema: Fraction = 0.9


def inter_modal(z: Tensor, other: Tensor, rows: Tensor, tau: float) -> Tensor:
    """Cross-entropy of z G_other^T / tau with the sample's own row as the target (CreamFL, inter-modal contrast).

    Args:
        z: [B, d] embeddings of one modality.
        other: [n, d] global embeddings of the other modality.
        rows: int64 [B], rows of the batch in ``other``.
        tau: temperature.
    """
    scores = z @ other.T / tau
    targets: Tensor = scores.gather(1, rows[:, None]).squeeze(1)
    return (scores.logsumexp(1) - targets).mean()


def intra_modal(z: Tensor, shared: Tensor, last: Tensor, tau: float) -> Tensor:
    """Cross-entropy over [z . g, z . z_old] / tau with the global embedding as target (CreamFL, intra-modal contrast).

    Args:
        z: [B, d] embeddings of one modality.
        shared: [B, d] global embeddings of the same samples and modality.
        last: [B, d] embeddings by the silo's last model.
        tau: temperature.
    """
    scores = torch.stack([(z * shared).sum(1), (z * last).sum(1)], dim=1) / tau
    return (scores.logsumexp(1) - scores[:, 0]).mean()


def distillation(z: Tensor, shared: Tensor) -> Tensor:
    """Mean squared distance over all entries [B, d] (CreamFL)."""
    return (z - shared).square().mean()


def contrasts(
    local: Local,
    shared: Mapping[str, Tensor],
    last: Mapping[str, Tensor],
    *,
    inter: float,
    intra: float,
    kd: float,
    tau: float,
    directions: bool = False,
) -> training.Extra | None:
    """Both contrasts and the distillation over the silo's modalities; None if all weights are 0.

    The intra-modal contrast is a mean over modalities, the other two terms are sums, as in CreamFL's code.

    Args:
        local: the silo; its codes are compared unsharpened, as those of the bank are.
        shared: global embeddings [n, d] of the training items, by modality.
        last: embeddings by the silo's last model; a modality without them has no intra-modal contrast.
        inter: weight of the contrast between modalities.
        intra: weight of the contrast within a modality.
        kd: weight of the distillation.
        tau: temperature of the contrasts.
        directions: normalise embeddings in the contrasts. Outputs of hash networks have arbitrary lengths; their inner
            products would outweigh the base loss by orders of magnitude.
    """
    if not (inter or intra or kd):
        return None

    def scaled(z: Tensor) -> Tensor:
        return unit(z) if directions else z

    def terms(step: training.Step, image: Out | None, text: Out | None) -> Tensor | None:
        losses = []
        image, text = personal_model.unsharpened(local, image, text)
        trained = sum(out is not None for out in (image, text))
        for name, other, out in (("image", "text", image), ("text", "image", text)):
            if out is None:
                continue
            z, rows = out.code, torch.from_numpy(step.rows)
            query = scaled(z)
            if inter and other in shared:
                bank = scaled(shared[other].to(z.device))
                losses.append(inter * inter_modal(query, bank, rows.to(z.device), tau))
            if intra and name in last:
                new, old = (scaled(codes[name][rows].to(z.device)) for codes in (shared, last))
                losses.append(intra / trained * intra_modal(query, new, old, tau))
            if kd:
                losses.append(kd * distillation(z, shared[name][rows].to(z.device)))
        return torch.stack(losses).sum() if losses else None

    return terms


def averaged(known: Mapping[str, Tensor], new: Mapping[str, Tensor], ema: float) -> dict[str, Tensor]:
    """The bank [n, d] of each modality after a moving-average step; the first embeddings initialise it."""
    return {name: ema * known[BANK + name] + (1 - ema) * z if BANK + name in known else z for name, z in new.items()}


class CreamFl(fedavg.AnchoredFedAvg):
    """CreamFL in our reading, see the module docstring."""

    Options: ClassVar[type[Any]] = CreamFlOptions
    options: CreamFlOptions

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """Our reading of the paper."""
        return Traits(our_reading=True)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on the base loss and the contrasts; the silo keeps the bank and its last embeddings."""
        rows, options = local.state.get(ROWS), self.options
        known = local.state if rows is not None and torch.equal(rows, local.dataset.rows) else {}
        with training.parameters(local, as_tensor(take(task.payloads, Model).buffer)):
            bank = averaged(known, self._embedded(local, task, "bank"), options.bank_ema)
        before = {name: known[LAST + name] for name in bank if LAST + name in known}
        terms = contrasts(
            local,
            bank,
            before,
            inter=options.inter,
            intra=options.intra,
            kd=options.kd,
            tau=options.contrast_tau,
            directions=self.context.objective.base != "info_nce",
        )
        trained = self.trained(local, task, extra=terms)
        last = {LAST + name: z for name, z in self._embedded(local, task, "last").items()}
        kept = {BANK + name: z for name, z in bank.items()}
        return replace(trained, state={**trained.state, **kept, **last, ROWS: local.dataset.rows.clone()})

    def _embedded(self, local: Local, task: Task, purpose: str) -> dict[str, Tensor]:
        """Embeddings [n, d] of the silo's samples by its current model, with one random caption each, on the CPU."""
        generator = training.generator_of(self.context, local, task, f"creamfl {purpose}")
        caption = training.choose_captions(local, generator)
        embeddings = training.embed_all(local, caption, self.context.training.batch_size)
        return {name: z for name, z in zip(MODALITIES, embeddings, strict=True) if z is not None}


PROTOCOL = CreamFl
