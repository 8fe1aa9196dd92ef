"""MFCPL (our reading): silos train towards class prototypes reported by the paired silos (Le et al., 2025).

Paired silos report the mean embedding of each class and modality; the coordinator averages them for each class, equally
over silos (the paper's eq 4). A class's complete prototype is the mean over both modalities. Every silo minimises its
base loss plus cmpr CMPR + cmpc CMPC + cma CMA:

- CMPR (eq 5), at the level that modalities share: the squared distance of the item's embedding, the mean over the
  modalities that the silo has, to its class's complete prototype;
- CMPC (eq 8), at the level of each modality: the cosine contrast of its embedding with the complete prototypes of all
  classes, the item's class as the target, at temperature ``proto_tau``;
- CMA: 1 - cos between the two embeddings of a pair, in paired silos.

We found no official code and had no full text of the paper, only its abstract, introduction and quotations of its
equations: what the terms compare follows these, while weights, temperature and CMA's distance are our choices. Two
departures follow from the model. The paper classifies, and its network has features of its own for what modalities
share; here both class terms act on the embeddings that are ranked, and draw the items of a class together, which
retrieval has to tell apart: tune their weights first. A lacking modality is left out, not filled with zeros.

Data without labels get ten pseudo-classes. At first paired silos report K-means centroids of their captions, embedded
by the initial model, which is close to the frozen encoder. Once as many silos as a synchronous cohort, or half of the
paired silos, have reported, the coordinator merges each silo's last centroids by seeded K-means; the pseudo-classes
are then fixed. Waiting prevents a first merge of few replies from deriving them from a single silo's captions. Silos
with captions assign a sample to the centroid nearest to its first caption; image-only silos assign it to the nearest
image prototype, using the downloaded model. A centroid of few samples reveals much about them: do not use this method
with tiny silos whose data are sensitive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmq.config.sections import NonNegative, Positive, Width
from fedmq.data.labels import fine_columns
from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import (
    Added,
    Context,
    FederatedProtocol,
    Local,
    MergeResult,
    SiloFacts,
    State,
    Task,
    Trained,
    Traits,
    Update,
    WeightedSum,
    take,
)
from fedmq.federation.sums import SumLayout
from fedmq.models.two_tower import Out
from fedmq.seeds import numpy_generator
from fedmq.wire.payloads import ClassPrototypes, Delta, Model, PartialDelta, Payload
from protocols import fedavg
from protocols.parts import aggregation, centroids, class_prototypes, personal_model, training
from protocols.parts.aggregation import as_tensor
from protocols.parts.class_prototypes import Shared
from protocols.parts.losses import cosine, cosines, unit

CENTRES = "pseudo_classes"
SIZES = "pseudo_classes_sizes"
#: Input of the pseudo-classes, by silo: centroids of its captions, their numbers of captions, whether it reported.
GIVEN, GIVEN_SIZES, REPORTED = "given_centroids", "given_centroids_sizes", "given_centroids_heard"


@dataclass(frozen=True)
class MfcplOptions(fedavg.AnchoredOptions):
    """Options of MFCPL, in addition to those of FedAvg.

    Args:
        cmpr: weight of the regulariser towards complete prototypes.
        cmpc: weight of the contrast with prototypes.
        cma: weight of the alignment of pairs.
        proto_tau: temperature of the contrast.
        contrast: contrast with the ``complete`` prototypes, or with those of the ``other`` modality.
        classes: number of pseudo-classes for data without labels.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {**fedavg.AnchoredOptions.OF, "cmpc": ("proto_tau", "contrast")}

    cmpr: NonNegative = 1.0
    cmpc: NonNegative = 1.0
    cma: NonNegative = 1.0
    proto_tau: Positive = 0.5
    contrast: Literal["complete", "other"] = "complete"
    classes: Annotated[Width, Field(ge=2)] = 10


def prototype_distance(z: Tensor, members: Tensor, prototypes: Tensor) -> Tensor:
    """CMPR: mean_i ||z_i - sum_c m_ic P_c||^2, of z [B, d], members [B, C], rows of sum 1, and prototypes [C, d]."""
    return (z - members @ prototypes).square().sum(1).mean()


def prototype_contrast(z: Tensor, members: Tensor, prototypes: Tensor, tau: float) -> Tensor:
    """CMPC of one modality: cross-entropy of members [B, C] and softmax_c(cos(z, P_c) / tau); z [B, d], P [C, d]."""
    scores = cosines(z, prototypes) / tau
    return -(members * scores.log_softmax(1)).sum(1).mean()


def proto_terms(
    image: Tensor | None, text: Tensor | None, members: Tensor, shared: Shared, options: MfcplOptions
) -> list[Tensor]:
    """Weighted CMPR and CMPC terms of a batch, over the samples whose classes have prototypes.

    Args:
        image: [B, d]; None if the silo has no images.
        text: [B, d] likewise.
        members: [B, C], rows sum to 1, or to 0 for a sample without class.
        shared: global prototypes.
        options: weights and temperature.
    """
    valid = shared.image_valid & shared.text_valid
    known = members * valid
    rows = known.sum(1) > 0
    if not bool(rows.any()):
        return []
    known = (known[rows] / known[rows].sum(1, keepdim=True))[:, valid]
    by_modality = (shared.image[valid], shared.text[valid])
    complete = (by_modality[0] + by_modality[1]) / 2
    present = [z[rows] for z in (image, text) if z is not None]
    terms = [options.cmpr * prototype_distance(torch.stack(present).mean(0), known, complete)] if options.cmpr else []
    for z, other in zip((image, text), by_modality[::-1], strict=True):
        if z is not None and options.cmpc:
            prototypes = complete if options.contrast == "complete" else other
            terms.append(options.cmpc * prototype_contrast(z[rows], known, prototypes, options.proto_tau))
    return terms


class Mfcpl(FederatedProtocol):
    """MFCPL in our reading, see the module docstring."""

    Options: ClassVar[type[Any]] = MfcplOptions
    options: MfcplOptions

    def __init__(self, options: MfcplOptions, context: Context) -> None:
        super().__init__(options, context)
        self.fedavg = fedavg.AnchoredFedAvg(options, context)
        self.columns = fine_columns(context.label_names)
        self.classes = len(self.columns) or options.classes
        self.pseudo = not context.label_names

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """Our reading of the paper."""
        return Traits(our_reading=True)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """As FedAvg; from a paired silo also class prototypes, at first caption centroids."""
        kinds = self.fedavg.uploads(silo)
        return kinds | {ClassPrototypes} if silo.paired else kinds

    # ----------------------------------------------------------------------- silo side
    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on FedAvg's loss and the three terms; a paired silo then adds its report."""
        device = local.model.flat.device
        received = [payload for payload in task.payloads if isinstance(payload, ClassPrototypes)]
        (prototypes,) = (payload for payload in received if payload.modality == "both")
        shared = class_prototypes.read_download(prototypes, device)
        members = self._members(local, task, received, shared)
        trained = self.fedavg.trained(local, task, extra=self._terms(local, members, shared))
        if not local.silo.paired:
            return trained
        report = self._centroids(local, task) if members is None else self._prototypes(local, task, members)
        return replace(trained, payloads=(*trained.payloads, report))

    def _members(self, local: Local, task: Task, received: Sequence[ClassPrototypes], shared: Shared) -> Tensor | None:
        """Class membership of the silo's samples, 0/1 [n, C]; None until pseudo-classes are available."""
        device = local.model.flat.device
        if not self.pseudo:
            return (training.labels_of(local, np.arange(len(local.dataset)))[:, self.columns] > 0).float()
        (centres,) = (payload for payload in received if payload.modality == "text")
        valid = torch.from_numpy(np.asarray(centres.counts) > 0)
        if not bool(valid.any()):
            return None
        if local.silo.text:
            points, rows = self._first_captions(local), as_tensor(centres.prototypes)
        else:
            valid = shared.image_valid.cpu()
            if not bool(valid.any()):
                return None
            with training.parameters(local, as_tensor(take(task.payloads, Model).buffer)):
                points, rows = self._embedded(local, None)[0], unit(shared.image.cpu())
        nearest = valid.nonzero().squeeze(1)[centroids.nearest(points, rows[valid])]
        return torch.nn.functional.one_hot(nearest, self.classes).float().to(device)

    def _first_captions(self, local: Local) -> Tensor:
        """Embeddings [n, d] of the first caption of each sample by the initial model."""
        with training.parameters(local, local.model.initial()):
            return self._embedded(local, np.zeros(len(local.dataset), np.int64))[-1]

    def _embedded(self, local: Local, caption: training.I64 | None) -> list[Tensor]:
        """Embeddings [n, d] of all samples of the silo, one tensor for each modality it has."""
        embeddings = training.embed_all(local, caption, self.context.training.batch_size)
        return [z for z in embeddings if z is not None]

    def _terms(self, local: Local, members: Tensor | None, shared: Shared) -> training.Extra | None:
        options = self.options
        if not (options.cmpr or options.cmpc or options.cma):
            return None

        def terms(step: training.Step, image: Out | None, text: Out | None) -> Tensor | None:
            losses: list[Tensor] = []
            if members is not None:
                batch = members[torch.from_numpy(step.rows).to(members.device)]
                # Prototypes are means of unsharpened codes. CMA compares codes that are equally sharp.
                outs = personal_model.unsharpened(local, image, text)
                codes = [None if out is None else out.code for out in outs]
                batch = batch / batch.sum(1, keepdim=True).clamp(min=1)
                losses = proto_terms(codes[0], codes[1], batch, shared, options)
            if options.cma and image is not None and text is not None:
                losses.append(options.cma * (1 - cosine(image.code, text.code).mean()))
            return torch.stack(losses).sum() if losses else None

        return terms

    def _prototypes(self, local: Local, task: Task, members: Tensor) -> ClassPrototypes:
        """The class prototypes of both modalities by the trained model."""
        caption = training.choose_captions(local, training.generator_of(self.context, local, task, "class prototypes"))
        return class_prototypes.of_features(self._embedded(local, caption), members.cpu(), self.context.dim)

    def _centroids(self, local: Local, task: Task) -> ClassPrototypes:
        """Centroids of the silo's captions, from which the coordinator derives the pseudo-classes."""
        points = self._first_captions(local)
        generator = training.generator_of(self.context, local, task, "centroids")
        centres, sizes = centroids.k_means(points, torch.ones(len(points)), self.classes, generator)
        return class_prototypes.payload(centres, sizes.round(), "text")

    # ----------------------------------------------------------------------- coordinator side
    def initial(self, theta: Tensor) -> State:
        """As FedAvg, with empty tables of prototypes and pseudo-classes."""
        state, dim = self.fedavg.initial(theta), self.context.dim
        tensors = {**state.tensors, **class_prototypes.initial(len(self.context.silos), 2 * self.classes, dim)}
        if self.pseudo:
            silos = len(self.context.silos)
            tensors |= {
                CENTRES: torch.zeros(self.classes, dim),
                SIZES: torch.zeros(self.classes, dtype=torch.int64),
                GIVEN: torch.zeros(silos, self.classes, dim),
                GIVEN_SIZES: torch.zeros(silos, self.classes, dtype=torch.int64),
                REPORTED: torch.zeros(silos, dtype=torch.bool),
            }
        return State(theta, tensors)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """As FedAvg, with the class prototypes; without labels also the pseudo-classes' centroids."""
        payloads = (*self.fedavg.task(state, silo), class_prototypes.download(state.tensors))
        if not self.pseudo:
            return payloads
        return (*payloads, class_prototypes.payload(state.tensors[CENTRES], state.tensors[SIZES], "text"))

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """As FedAvg; then update the class prototypes, and the pseudo-classes once enough silos sent centroids."""
        merged = self.fedavg.merge(state, replies, round_)
        reports = [(reply, take(reply.payloads, ClassPrototypes)) for reply in replies if reply.silo.paired]
        tensors = dict(merged.state.tensors)
        if self.pseudo and not bool((tensors[SIZES] > 0).any()):
            tensors |= self._stored_centroids(
                tensors, replies, [report for report in reports if report[1].modality == "text"]
            )
            tensors |= self._pseudo_classes(tensors)
        prototypes = [report for report in reports if report[1].modality == "both"]
        tensors |= class_prototypes.updated(tensors, prototypes, round_, max_age=self.context.max_age, weighted=False)
        return MergeResult(replace(merged.state, tensors=tensors), merged.log)

    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        """Updates and class prototypes as secure sums; a prototype is of the silos of this round."""
        weighted, layout = self.fedavg.weigh(state, replies, round_), self.sum_layout()

        def finish(added: Added) -> MergeResult:
            merged = weighted.finish(added)
            tensors = {**merged.state.tensors, **class_prototypes.updated_by_sum(state.tensors, added.means, layout)}
            return replace(merged, state=replace(merged.state, tensors=tensors))

        rows = {**weighted.rows, **aggregation.row_weights(replies, layout, ClassPrototypes, weighted=False)}
        return replace(weighted, rows=rows, finish=finish)

    def sum_layout(self) -> SumLayout:
        """The update and the class prototypes of both modalities."""
        rows = class_prototypes.summed(self.context, 2 * self.classes, class_prototypes.longest_code(self.context))
        layout = self.fedavg.sum_layout()
        return replace(layout, rows={**layout.rows, **rows})

    def no_sum(self) -> str:
        """Why a merge with pseudo-classes is no sum."""
        return "without labels it clusters the silos' centroids" if self.pseudo else ""

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the class prototypes or centroids of a reply, if any.

        Raises:
            RemoteWireError: wrong number of rows or columns, a row longer than a mean of embeddings can be, centroids
                although the data have labels, or centroids of more samples in total than the update.
        """
        longest = class_prototypes.longest_code(self.context)
        changes = [payload.n_samples for payload in payloads if isinstance(payload, Delta | PartialDelta)]
        for payload in payloads:
            if isinstance(payload, ClassPrototypes):
                if payload.modality != "both" and not (self.pseudo and payload.modality == "text"):
                    raise RemoteWireError("unexpected", f"class prototypes of modality {payload.modality}")
                rows = self.classes if payload.modality == "text" else 2 * self.classes
                class_prototypes.check_rows(payload, rows, self.context.dim, longest)
                # Sizes weight the centroids of the fixed pseudo-classes; each sample belongs to one centroid.
                if payload.modality == "text" and (most := sum(payload.counts.tolist())) > (samples := sum(changes)):
                    raise RemoteWireError("malformed", f"centroids of {most} samples, the update of {samples}")

    def _stored_centroids(
        self,
        tensors: Mapping[str, Tensor],
        replies: Sequence[Update],
        centroids: Sequence[tuple[Update, ClassPrototypes]],
    ) -> dict[str, Tensor]:
        """The table of which silos have reported and each silo's last centroids, updated with the replies."""
        given, sizes, reported = (tensors[name].clone() for name in (GIVEN, GIVEN_SIZES, REPORTED))
        reported[[reply.silo.index for reply in replies]] = True
        for reply, sent in centroids:
            given[reply.silo.index], sizes[reply.silo.index] = as_tensor(sent.prototypes), as_tensor(sent.counts)
        return {GIVEN: given, GIVEN_SIZES: sizes, REPORTED: reported}

    def _pseudo_classes(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The silos' centroids merged by seeded K-means; empty until enough silos have reported."""
        valid, cohort = tensors[GIVEN_SIZES] > 0, self.context.cohort
        senders, paired = int(valid.any(1).sum()), sum(silo.paired for silo in self.context.silos)
        full_round = cohort is None or int(tensors[REPORTED].sum()) >= cohort
        if senders == 0 or not (full_round or 2 * senders >= paired):
            return {}
        generator = numpy_generator(self.context.seed, "mfcpl", "classes")
        points, sizes = tensors[GIVEN][valid], tensors[GIVEN_SIZES][valid]
        centres, totals = centroids.k_means(points, sizes, self.classes, generator)
        return {CENTRES: centres.float(), SIZES: totals.round().long()}


PROTOCOL = Mfcpl
