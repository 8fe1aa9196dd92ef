"""MFCPL, our reading: class prototypes of paired silos teach the silos that lack a modality (Le et al. 2025).

No official code was found and the abstract leaves weights and details open, so results are of our
reading. Silos with both modalities report the mean embedding of each class and modality; the coordinator averages them
class by class, equally over silos. Every silo adds three terms to FedAvg's loss, each of weight 1:

- CMPR, squared distance to the class's complete prototype, the mean of its two modalities';
- CMPC, cosine contrast at temperature 0.5 against the *other* modality's prototypes, the own class being right;
- CMA, 1 - cos between the two embeddings of a pair, in paired silos.

Without labels there are ten pseudo-classes. Until there are, a paired silo reports K-means centroids of its captions,
embedded by the initial model, which is nearly the frozen encoder. Once as many silos as a synchronous cohort has were
heard, or half of the paired ones, the coordinator merges each one's last centroids by seeded K-means, and the classes
then stay: of a single merge of few replies one silo's captions would make them for all. Silos with captions class a
sample by the centroid nearest to its first caption, silos with images alone by the nearest image prototype, with the
downloaded model. A centroid of few samples is close to them: whoever minds should not run this on tiny silos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedmq.data.label_levels import fine_columns
from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import (
    Context,
    FederatedProtocol,
    Local,
    MergeResult,
    Reply,
    SiloFacts,
    State,
    Task,
    Trained,
    Traits,
    take,
)
from fedmq.models.two_tower import Out
from fedmq.seeds import numpy_generator
from fedmq.wire.messages import ClassPrototypes, Delta, Model, PartialDelta, Payload
from protocols import _aggregation, _class_prototypes, _clusters, _personal_model, _training, fedavg
from protocols._aggregation import as_tensor
from protocols._class_prototypes import Shared
from protocols._losses import cosine, unit
from protocols._options import check

CENTRES = "pseudo_classes"
SIZES = "pseudo_classes_sizes"
#: What pseudo-classes are made of, by silo: centroids of its captions, the captions behind each, whether it was heard.
GIVEN, GIVEN_SIZES, HEARD = "given_centroids", "given_centroids_sizes", "given_centroids_heard"


@dataclass(frozen=True)
class MfcplOptions(fedavg.FedAvgOptions):
    """Options of MFCPL, in addition to those of FedAvg.

    Args:
        cmpr: weight of the regulariser towards complete prototypes.
        cmpc: weight of the contrast with the other modality's prototypes.
        cma: weight of the alignment of pairs.
        proto_tau: temperature of the contrast.
        classes: how many pseudo-classes there are where the data set has no labels.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **fedavg.FedAvgOptions.OF,
        "cmpc": ("proto_tau",),
    }

    cmpr: float = 1.0
    cmpc: float = 1.0
    cma: float = 1.0
    proto_tau: float = 0.5
    classes: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cmpr", "cmpc", "cma"):
            check(name, getattr(self, name), 0.0)
        check("proto_tau", self.proto_tau, 0.0, open_low=True)
        check("classes", self.classes, 2)


def prototype_distance(z: Tensor, members: Tensor, prototypes: Tensor) -> Tensor:
    """CMPR of one modality: mean_i ||z_i - sum_c m_ic P_c||^2.

    Args:
        z: [B, d].
        members: [B, C], rows sum to 1; one-hot for a sample with one label.
        prototypes: [C, d].
    """
    return (z - members @ prototypes).square().sum(1).mean()


def prototype_contrast(z: Tensor, members: Tensor, prototypes: Tensor, tau: float) -> Tensor:
    """CMPC of one modality: cross-entropy of ``members`` [B, C] and softmax_c cos(z [B, d], P_c [C, d]) / tau."""
    scores = unit(z) @ unit(prototypes).T / tau
    return -(members * scores.log_softmax(1)).sum(1).mean()


def modal_alignment(image: Tensor, text: Tensor) -> Tensor:
    """CMA: mean 1 - cos of the two embeddings [B, d] of a pair."""
    return 1 - cosine(image, text).mean()


def proto_terms(
    image: Tensor | None, text: Tensor | None, members: Tensor, shared: Shared, options: MfcplOptions
) -> list[Tensor]:
    """CMPR and CMPC of a batch, weighted, for the samples and classes that have prototypes.

    Args:
        image: [B, d]; None if the silo has no images.
        text: [B, d] likewise.
        members: [B, C], rows sum to 1, or to 0 for a sample of no class.
        shared: the global prototypes.
        options: weights and temperature.
    """
    valid = shared.image_valid & shared.text_valid
    known = members * valid
    rows = known.sum(1) > 0
    if not bool(rows.any()):
        return []
    known = (known[rows] / known[rows].sum(1, keepdim=True))[:, valid]
    by_modality = (shared.image[valid], shared.text[valid])
    complete, terms = (by_modality[0] + by_modality[1]) / 2, []
    for z, other in zip((image, text), by_modality[::-1], strict=True):
        if z is None:
            continue
        if options.cmpr:
            terms.append(options.cmpr * prototype_distance(z[rows], known, complete))
        if options.cmpc:
            terms.append(options.cmpc * prototype_contrast(z[rows], known, other, options.proto_tau))
    return terms


class Mfcpl(FederatedProtocol):
    """MFCPL as we read it, see the module docstring."""

    Options: ClassVar[type[Any]] = MfcplOptions

    def __init__(self, options: MfcplOptions, context: Context) -> None:
        self.options = options
        self.context = context
        self.fedavg = fedavg.FedAvg(options, context)
        self.columns = fine_columns(context.label_names)
        self.classes = len(self.columns) or options.classes
        self.pseudo = not context.label_names

    def traits(self) -> Traits:
        """Our reading of the abstract."""
        return Traits(our_reading=True)

    def eligible(self, silo: SiloFacts) -> bool:
        """All silos are eligible."""
        return self.fedavg.eligible(silo)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """As FedAvg, and of a paired silo its class prototypes, at first its centroids."""
        kinds = self.fedavg.uploads(silo)
        return kinds | {ClassPrototypes} if silo.paired else kinds

    # ----------------------------------------------------------------------- silo side
    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on FedAvg's loss and the three terms; then the report of a paired silo."""
        device = local.model.flat.device
        received = [payload for payload in task.payloads if isinstance(payload, ClassPrototypes)]
        (found,) = (payload for payload in received if payload.modality == "both")
        shared = _class_prototypes.read_download(found, device)
        members = self._members(local, task, received, shared)
        trained = self.fedavg.trained(local, task, extra=self._terms(local, members, shared))
        if not local.silo.paired:
            return trained
        report = self._centroids(local, task) if members is None else self._prototypes(local, task, members)
        return replace(trained, payloads=(*trained.payloads, report))

    def _members(self, local: Local, task: Task, received: Sequence[ClassPrototypes], shared: Shared) -> Tensor | None:
        """Which classes each of the silo's samples belongs to, 0/1 [n, C]; None while nobody can say."""
        device = local.model.flat.device
        if not self.pseudo:
            return (_training.labels_of(local, np.arange(len(local.share)))[:, self.columns] > 0).float()
        (centres,) = (payload for payload in received if payload.modality == "text")
        there = torch.from_numpy(np.asarray(centres.counts) > 0)
        if not bool(there.any()):
            return None
        if local.silo.text:
            points, rows = self._first_captions(local), as_tensor(centres.prototypes)
        else:
            there = shared.image_valid.cpu()
            if not bool(there.any()):
                return None
            with _training.parameters(local, as_tensor(take(task.payloads, Model).buffer)):
                points, rows = self._embedded(local, None)[0], unit(shared.image.cpu())
        found = there.nonzero().squeeze(1)[_clusters.nearest(points, rows[there])]
        return torch.nn.functional.one_hot(found, self.classes).float().to(device)

    def _first_captions(self, local: Local) -> Tensor:
        """The first caption of each of the silo's samples as the initial model embeds it, [n, d]."""
        with _training.parameters(local, local.model.initial()):
            return self._embedded(local, np.zeros(len(local.share), np.int64))[-1]

    def _embedded(self, local: Local, caption: _training.I64 | None) -> list[Tensor]:
        """Embeddings [n, d] of all the silo's samples in the modalities it has."""
        found = _training.embed_all(local, caption, self.context.training.batch_size)
        return [z for z in found if z is not None]

    def _terms(self, local: Local, members: Tensor | None, shared: Shared) -> _training.Extra | None:
        options = self.options
        if not (options.cmpr or options.cmpc or options.cma):
            return None

        def terms(step: _training.Step, image: Out | None, text: Out | None) -> Tensor | None:
            found: list[Tensor] = []
            if members is not None:
                own = members[torch.from_numpy(step.rows).to(members.device)]
                # Prototypes are of codes as they are outside training; the codes of a pair are as sharp as each other.
                outs = _personal_model.unsharpened(local, image, text)
                codes = [None if out is None else out.code for out in outs]
                found = proto_terms(codes[0], codes[1], own / own.sum(1, keepdim=True).clamp(min=1), shared, options)
            if options.cma and image is not None and text is not None:
                found.append(options.cma * modal_alignment(image.code, text.code))
            return torch.stack(found).sum() if found else None

        return terms

    def _prototypes(self, local: Local, task: Task, members: Tensor) -> ClassPrototypes:
        """The class prototypes of both modalities with the model as training left it."""
        caption = _training.choose_captions(
            local, _training.generator_of(self.context, local, task, "class prototypes")
        )
        return _class_prototypes.of_features(self._embedded(local, caption), members.cpu(), self.context.dim)

    def _centroids(self, local: Local, task: Task) -> ClassPrototypes:
        """Centroids of the silo's captions, of which the coordinator makes the pseudo-classes."""
        points = self._first_captions(local)
        generator = _training.generator_of(self.context, local, task, "centroids")
        centres, sizes = _clusters.k_means(points, torch.ones(len(points)), self.classes, generator)
        return _class_prototypes.payload(centres, sizes.round(), "text")

    # ----------------------------------------------------------------------- coordinator side
    def initial(self, theta: Tensor) -> State:
        """As FedAvg; no prototype and no pseudo-class yet."""
        state, dim = self.fedavg.initial(theta), self.context.dim
        tensors = {**state.tensors, **_class_prototypes.initial(len(self.context.silos), 2 * self.classes, dim)}
        if self.pseudo:
            tensors |= {CENTRES: torch.zeros(self.classes, dim), SIZES: torch.zeros(self.classes, dtype=torch.int64)}
            tensors |= self._nothing_given()
        return State(theta, tensors)

    def _nothing_given(self) -> dict[str, Tensor]:
        """No silo heard of yet."""
        silos = len(self.context.silos)
        return {
            GIVEN: torch.zeros(silos, self.classes, self.context.dim),
            GIVEN_SIZES: torch.zeros(silos, self.classes, dtype=torch.int64),
            HEARD: torch.zeros(silos, dtype=torch.bool),
        }

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """As FedAvg, and the class prototypes; without labels the pseudo-classes' centroids too."""
        payloads = (*self.fedavg.task(state, silo), _class_prototypes.download(state.tensors))
        if not self.pseudo:
            return payloads
        return (*payloads, _class_prototypes.payload(state.tensors[CENTRES], state.tensors[SIZES], "text"))

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """As FedAvg; then the class prototypes, or the pseudo-classes once enough silos sent centroids."""
        merged, replies = self.fedavg.merge(state, replies, round_), _aggregation.ordered(replies)
        found = [(reply, take(reply.payloads, ClassPrototypes)) for reply in replies if reply.silo.paired]
        tensors = dict(merged.state.tensors)
        if self.pseudo and not bool((tensors[SIZES] > 0).any()):
            # A checkpoint from before centroids were kept by silo lacks them.
            tensors = {**self._nothing_given(), **tensors}
            tensors |= self._given(tensors, replies, [each for each in found if each[1].modality == "text"])
            tensors |= self._pseudo_classes(tensors)
        reported = [each for each in found if each[1].modality == "both"]
        tensors |= _class_prototypes.updated(tensors, reported, round_, max_age=self.context.max_age, weighted=False)
        return MergeResult(replace(merged.state, tensors=tensors), merged.log)

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check class prototypes or centroids, where a reply has them: their shape, and that they can be means.

        Raises:
            RemoteWireError: another number of rows or columns, a row longer than any embedding, centroids where there
                are labels, or of more samples together than the update, which was checked against what the silo has.
        """
        longest = _class_prototypes.longest_code(self.context)
        samples = next(each.n_samples for each in payloads if isinstance(each, Delta | PartialDelta))
        for payload in payloads:
            if isinstance(payload, ClassPrototypes):
                if payload.modality != "both" and not (self.pseudo and payload.modality == "text"):
                    raise RemoteWireError("unexpected", f"class prototypes of modality {payload.modality}")
                rows = self.classes if payload.modality == "text" else 2 * self.classes
                _class_prototypes.check_rows(payload, rows, self.context.dim, longest)
                # Each sample is in one centroid, by whose sizes the pseudo-classes are made, once for the whole run.
                if payload.modality == "text" and (most := sum(payload.counts.tolist())) > samples:
                    raise RemoteWireError("malformed", f"centroids of {most} samples, the update of {samples}")

    def _given(
        self, tensors: Mapping[str, Tensor], replies: Sequence[Reply], found: Sequence[tuple[Reply, ClassPrototypes]]
    ) -> dict[str, Tensor]:
        """Which silos were heard of so far, and the last centroids of each that sent any."""
        given, sizes, heard = (tensors[name].clone() for name in (GIVEN, GIVEN_SIZES, HEARD))
        heard[[reply.silo.index for reply in replies]] = True
        for reply, each in found:
            given[reply.silo.index], sizes[reply.silo.index] = as_tensor(each.prototypes), as_tensor(each.counts)
        return {GIVEN: given, GIVEN_SIZES: sizes, HEARD: heard}

    def _pseudo_classes(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The silos' centroids merged by seeded K-means; nothing while too few silos were heard."""
        there, cohort = tensors[GIVEN_SIZES] > 0, self.context.cohort
        senders, paired = int(there.any(1).sum()), sum(silo.paired for silo in self.context.silos)
        a_round = cohort is None or int(tensors[HEARD].sum()) >= cohort
        if senders == 0 or not (a_round or 2 * senders >= paired):
            return {}
        generator = numpy_generator(self.context.seed, "mfcpl", "classes")
        points, sizes = tensors[GIVEN][there], tensors[GIVEN_SIZES][there]
        centres, held = _clusters.k_means(points, sizes, self.classes, generator)
        return {CENTRES: centres.float(), SIZES: held.round().long()}


PROTOCOL = Mfcpl
