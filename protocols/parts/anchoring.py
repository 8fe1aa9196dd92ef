"""Anchoring of single-modality silos as in RCSR's baselines; added to FedAvg and its variants.

Under the base info_nce a single-modality silo has no pairs to contrast. With anchoring, it pulls its embeddings towards
the global prototype of the modality it lacks (RCSR eq 3); every silo reports its prototypes, and the coordinator keeps
their moving average (RCSR, below eq 11). Without anchoring it idles: it is selected and replies with a zero update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from fedmq.config.sections import Fraction, NonNegative
from fedmq.federation.protocol import Context, Local, Task, Update, WeightedSum, take
from fedmq.federation.sums import SumLayout
from fedmq.wire.payloads import ModalityPrototypes, Payload
from protocols.parts import aggregation, prototypes, training
from protocols.parts.losses import anchor


@dataclass(frozen=True)
class AnchoringOptions:
    """Options of anchoring.

    Args:
        single_modality: what single-modality silos do: ``anchor`` or ``idle``. This and the next three options apply to
            the base ``info_nce`` only.
        lambda_anc: weight of the anchoring loss. This and the next two options apply to ``anchor`` only.
        ema: fraction of the old global prototype kept over a full round.
        proto_unit: normalise global prototypes to unit length.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {"single_modality=anchor": ("lambda_anc", "ema", "proto_unit")}

    single_modality: Literal["anchor", "idle"] = "anchor"
    lambda_anc: NonNegative = 1.0
    ema: Fraction = 0.9
    proto_unit: bool = True


def anchored_loss(image: Tensor | None, text: Tensor | None, missing: Tensor, weight: float) -> Tensor:
    """RCSR eq 3 for a single-modality silo's batch [B, d] and the prototype [d] of the modality it lacks."""
    present = image if image is not None else text
    if present is None:
        raise ValueError("a silo has at least one modality")
    return weight * anchor(present, missing)


class Anchoring:
    """Anchoring at the silo and at the coordinator; does nothing if single-modality silos idle or under other bases.

    Attributes:
        uploads: payload kinds it adds to every reply.
    """

    def __init__(self, options: AnchoringOptions, context: Context) -> None:
        self.options = options
        self.context = context
        self._active = context.objective.base == "info_nce" and options.single_modality == "anchor"
        self.uploads: frozenset[type[Payload]] = frozenset({ModalityPrototypes} if self._active else ())

    # ----------------------------------------------------------------------- silo side
    def work(self, local: Local, task: Task) -> training.Work | None:
        """Local training of a single-modality silo; None if it idles or its missing modality has no prototype yet."""
        image, text = self._received(task)
        missing = text if local.silo.image else image
        if missing is None:
            return None
        loss = partial(anchored_loss, missing=missing.to(local.model.flat.device), weight=self.options.lambda_anc)
        return training.EveryBatch(local, self.context.training.batch_size, loss)

    def report(self, local: Local, task: Task, *, filled: bool = True) -> tuple[Payload, ...]:
        """The silo's prototypes under the trained model, which it holds.

        The row of a missing modality, which the coordinator ignores, is the global prototype, or zeros if not
        ``filled``.
        """
        if not self._active:
            return ()
        means = prototypes.silo_prototypes(local, self.context, task)
        return (prototypes.upload(means, self._received(task) if filled else (None, None)),)

    def _received(self, task: Task) -> tuple[Tensor | None, Tensor | None]:
        return prototypes.read_download(take(task.payloads, ModalityPrototypes)) if self._active else (None, None)

    # ----------------------------------------------------------------------- coordinator side
    def initial(self) -> Mapping[str, Tensor]:
        """The coordinator's tensors before the first round: no prototype yet."""
        return prototypes.initial(self.context.dim) if self._active else {}

    def download(self, tensors: Mapping[str, Tensor]) -> tuple[Payload, ...]:
        """The global prototypes, for every silo."""
        return (prototypes.download(tensors),) if self._active else ()

    def averaged(
        self, tensors: Mapping[str, Tensor], replies: Sequence[Update], weights: Tensor
    ) -> Mapping[str, Tensor]:
        """The coordinator's tensors after a merge, with the silos' prototypes averaged in by weights float64 [M]."""
        if not self._active:
            return tensors
        local, mask = prototypes.read_uploads(replies, self.context.dim)
        rate = aggregation.decay_at_merge(self.options.ema, len(replies), self.context.cohort)
        updated = prototypes.updated(tensors, local, mask, weights, rate, unit_length=self.options.proto_unit)
        return {**tensors, **updated}

    def sum_layout(self, layout: SumLayout) -> SumLayout:
        """What a secure sum adds, with the prototypes."""
        return replace(layout, rows={**prototypes.summed(self.context.dim), **layout.rows}) if self._active else layout

    def weighed(
        self, weighted: WeightedSum, tensors: Mapping[str, Tensor], replies: Sequence[Update], layout: SumLayout
    ) -> WeightedSum:
        """A secure sum of updates, with the prototypes; see :func:`protocols.parts.prototypes.with_sum`."""
        ema, cohort, unit_length = self.options.ema, self.context.cohort, self.options.proto_unit
        return prototypes.with_sum(weighted, tensors, replies, layout, ema=ema, cohort=cohort, unit_length=unit_length)
