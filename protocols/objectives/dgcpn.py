"""DGCPN (Yu et al. 2021): codes that preserve a neighbourhood graph, FedUCH's first base (FedUCH eqs 4-7).

Needs no labels. A single-modality silo uses the intra-modal term only, with the similarity of its modality. The last
weights of both towers start from N(0, 0.3^2), in its code those of the text tower alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import Fraction, NonNegative
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.hash_networks import signs
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from fedmq.models.two_tower import Out
from protocols.parts import training
from protocols.parts.losses import EPSILON, cosines, unit
from protocols.parts.similarity import item_features, mean_square


@dataclass(frozen=True)
class Options:
    """Options of DGCPN; defaults are those of FedUCH's code.

    Args:
        a1: weight of the text in the pairwise similarity; 0.01 in DGCPN's code.
        a2: weight of the neighbours' agreement.
        scale_share: scale of the neighbours' agreement, as a fraction of the silo's n items; 0.8 in DGCPN's code.
        zeroed_share: smallest entries of a row set to 0, as a fraction of that scale; 0.75 in DGCPN's code.
        coexistence: K, the target similarity of a pair.
        lambda1: weight of the graph term Q_g.
        lambda2: weight of the consistency term Q_i.
        form: ``code`` uses mean squares and excludes the diagonal from Q_g; ``paper`` uses the trace and the Frobenius
            norms that FedUCH prints.
        similarity: compute S from the silo's ``features``, as in the code, or from the batch's ``codes``, as S_gc in
            FedUCH's eq 6. S is a target without gradient.
        binary_steps: add an update of each tower per batch against the other tower's binary codes, as in the code.
    """

    a1: Fraction = 0.3
    a2: Fraction = 0.3
    scale_share: Fraction = 0.9
    zeroed_share: Fraction = 0.45
    coexistence: NonNegative = 1.5
    lambda1: NonNegative = 1.0
    lambda2: NonNegative = 1.0
    form: Literal["code", "paper"] = "code"
    similarity: Literal["features", "codes"] = "features"
    binary_steps: bool = True


# --- the graph ------------------------------------------------------------------------------------------------------
def smallest(values: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` smallest entries in each row [B, n], ties to the lowest index as in a stable sort."""
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    threshold = values.kthvalue(count, dim=1, keepdim=True).values
    below, equal = values < threshold, values == threshold
    room = count - below.sum(1, keepdim=True)
    return below | (equal & (equal.cumsum(1) <= room))


@dataclass(frozen=True)
class Graph:
    """DGCPN's similarity over a silo's whole training set, computed batch by batch.

    A batch needs memory for [B, n]; the n x n matrix is never stored. Rows are recomputed for every batch, which is
    cheap compared with the networks. Products of features are normalised, which avoids a normalised copy of them.
    """

    image: Tensor  # [n, d_i] features of any length
    text: Tensor  # [n, d_t] features of any length
    options: Options = Options()  # weights and shares

    @cached_property
    def scale(self) -> int:
        """The scale rho of the neighbours' agreement."""
        return round(self.options.scale_share * len(self.image))

    def pairs(self, rows: Tensor) -> Tensor:
        """P[rows] = a1 F_T F_T^T + (1 - a1) F_I F_I^T -> [B, n]."""
        text, image = self._cosines(self.text, rows), self._cosines(self.image, rows)
        return self.options.a1 * text + (1 - self.options.a1) * image

    def _cosines(self, features: Tensor, rows: Tensor) -> Tensor:
        lengths = self._lengths[0 if features is self.image else 1]
        return unit(features[rows]) @ features.T / lengths

    @cached_property
    def _lengths(self) -> tuple[Tensor, Tensor]:
        """Lengths of the image and the text features, each [n]."""
        image, text = (torch.linalg.vector_norm(rows, dim=1).clamp_min(EPSILON) for rows in (self.image, self.text))
        return image, text

    def neighbours(self, rows: Tensor, pairs: Tensor) -> Tensor:
        """A[rows]: P without each row's z smallest entries and the item itself, rows summing to 1 -> [B, n].

        Negative entries are dropped too: the papers' features have none, and a row whose entries sum to nearly 0 could
        not be normalised.

        Args:
            rows: int64 [B].
            pairs: [B, n], P[rows].
        """
        zeroed = min(round(self.options.zeroed_share * self.scale), len(self.image))
        kept = pairs.clamp_min(0).masked_fill(smallest(pairs, zeroed), 0)
        kept[torch.arange(len(rows)), rows] = 0
        return kept / kept.sum(1, keepdim=True).clamp_min(EPSILON)

    def agreement(self, rows: Tensor, pairs: Tensor) -> Tensor:
        """The neighbours' agreement rho A A^T between the given rows -> [B, B]."""
        near = self.neighbours(rows, pairs)
        return self.scale * near @ near.T

    def similarity(self, rows: Tensor) -> Tensor:
        """S = 2 [(1 - a2) P + a2 rho A A^T] - 1 between the given rows int64 [B] -> [B, B]."""
        pairs = self.pairs(rows)
        return 2 * ((1 - self.options.a2) * pairs[:, rows] + self.options.a2 * self.agreement(rows, pairs)) - 1


# --- the loss -------------------------------------------------------------------------------------------------------
Loss = Callable[[Tensor | None, Tensor | None, Tensor, Options], Tensor]


class Terms(NamedTuple):
    """Q_c, Q_g and Q_i, scalars."""

    coexistence: Tensor
    graph: Tensor
    consistency: Tensor


def terms_of_code(image: Tensor, text: Tensor, similar: Tensor, coexistence: float) -> Terms:
    """Q_c, Q_g, Q_i as in DGCPN's code, of codes [B, r] and S [B, B], with K = ``coexistence``.

    They are means of squares, with the diagonal excluded from Q_g.
    """
    image, text = unit(image), unit(text)
    vv, tt, vt = image @ image.T, text @ text.T, image @ text.T
    all_three = torch.stack([vt.T, vv, tt])
    # S is symmetric, so vt and its transpose have the same graph term; three of the four consistency terms are
    # distances between vt and one of these.
    consistency = 3 * mean_square(vt, all_three) + mean_square(vv, tt)
    graph = 3 * graph_term(all_three, similar)
    return Terms((vt.diagonal() - coexistence).square().mean(), graph, consistency)


def graph_term(cosine: Tensor, similar: Tensor) -> Tensor:
    """Mean over [..., B, B] of (cosine - S)^2, with the diagonal counted as 0."""
    diagonal = torch.eye(len(similar), dtype=torch.bool, device=similar.device)
    return (cosine - similar).masked_fill(diagonal, 0).square().mean()


def terms_of_paper(image: Tensor, text: Tensor, similar: Tensor, coexistence: float) -> Terms:
    """Q_c, Q_g, Q_i as printed by FedUCH (eqs 5 to 7): a trace and Frobenius norms; see :func:`terms_of_code`."""
    vv, tt, vt = cosines(image, image), cosines(text, text), cosines(image, text)
    norm = torch.linalg.matrix_norm
    return Terms(
        (vt.diagonal() - coexistence).sum().abs(),
        norm(vv - similar) + norm(tt - similar) + norm(vt - similar),
        norm(vt - vv) + norm(vt - tt) + norm(vt - vt.T) + norm(vv - tt),
    )


def loss(image: Tensor | None, text: Tensor | None, similar: Tensor, options: Options) -> Tensor:
    """Q_c + lambda1 Q_g + lambda2 Q_i (FedUCH eq 4); for a single modality, its part of lambda1 Q_g.

    Args:
        image: [B, r] codes; None if the silo has no images.
        text: [B, r] likewise.
        similar: [B, B] S.
        options: weights and form.
    """
    if image is not None and text is not None:
        terms = terms_of_code if options.form == "code" else terms_of_paper
        parts = terms(image, text, similar, options.coexistence)
        return parts.coexistence + options.lambda1 * parts.graph + options.lambda2 * parts.consistency
    present = image if image is not None else text
    if present is None:
        raise ValueError("a silo has at least one modality")
    cosine = cosines(present, present)
    if options.form == "code":
        return options.lambda1 * graph_term(cosine, similar)
    norm: Tensor = torch.linalg.matrix_norm(cosine - similar)
    return options.lambda1 * norm


def binary_loss(image: Tensor | None, text: Tensor | None, similar: Tensor, options: Options) -> Tensor:
    """Loss of each modality against the other's binary codes, both from before this update; codes [B, r] and S [B, B].

    DGCPN's code takes two updates from one forward pass: the first changes only the image tower, the second only the
    text tower. One update on the sum of both losses is equivalent.
    """
    if image is None or text is None:
        raise ValueError("binary codes of both modalities need a paired silo")
    of_image = loss(image, signs(text.detach()), similar, options)
    return of_image + loss(signs(image.detach()), text, similar, options)


def similarity_of_codes(image: Tensor | None, text: Tensor | None, options: Options) -> Tensor:
    """S_gc(H^V, H^T) of FedUCH's eq 6 over the batch only -> [B, B]; without gradient.

    Args:
        image: [B, r] codes; None if the silo has no images.
        text: [B, r] likewise.
        options: options of the graph.
    """
    present = [unit(code.detach()) for code in (image, text) if code is not None]
    rows = torch.arange(len(present[0]), device=present[0].device)
    return Graph(present[0], present[-1], options).similarity(rows)


@dataclass(frozen=True)
class Dgcpn(training.Work):
    """DGCPN in one task: a step on the relaxed codes, then one on each modality against the other's binary codes."""

    options: Options
    local: Local
    batch_size: int
    graph: Graph | None  # over the silo's features; None if S is computed from codes

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[training.Step]:
        """Two steps per batch at a paired silo, one at others; a method's extra terms enter the first."""
        caption = training.choose_captions(self.local, generator)
        device = self.local.model.flat.device
        for rows in training.batches(len(self.local.dataset), self.batch_size, generator):
            fixed = None if self.graph is None else self.graph.similarity(torch.from_numpy(rows).to(device))

            def step(chosen: Loss, image: Out | None, text: Out | None, fixed: Tensor | None = fixed) -> Tensor:
                both = training.codes(image, text)
                similar = similarity_of_codes(*both, self.options) if fixed is None else fixed
                return chosen(*both, similar, self.options)

            yield training.Step(rows, caption, partial(step, loss))
            if self.options.binary_steps and self.local.silo.paired:
                yield training.Step(rows, caption, partial(step, binary_loss), main=False)


def begin(options: Options, local: Local, context: Context, task: Task) -> Dgcpn:
    """Start DGCPN for one task; single-modality silos train it on their modality."""
    graph = None
    if options.similarity == "features":
        image, text = (features.to(local.model.flat.device) for features in item_features(local.dataset))
        graph = Graph(image, text, options)
    return Dgcpn(options, local, context.training.batch_size, graph)


def network(options: Options) -> TowerPlan:
    """DGCPN's towers."""
    return TowerPlan((4096,), (4096,), tanh=True, dropout=True, last_std=0.3)


OBJECTIVE = ObjectiveKind(Options, begin, network, needs_labels=False, on_features=True)
