"""Class prototypes: silos' means per class and modality, the coordinator's table of them, and the global averages.

On the wire, both modalities' prototypes of C classes are one payload of 2 C rows, ``modality: both``, image rows before
text rows. FedHAP sends C rows, and ``modality`` names the modality they are means of. A row of count 0 is absent.

A row is a mean of tower outputs, so its length cannot exceed the longest possible output. Longer rows are rejected: one
row of 1e30 would stay in the table and make every honest silo's loss infinite from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import Context, Update, take
from fedmq.federation.sums import SumLayout, SummedRows
from fedmq.models.hash_networks import plans_of
from fedmq.wire.payloads import ClassPrototypes, Payload
from protocols.parts.aggregation import as_tensor, means_of, still_known, updated_table
from protocols.parts.prototypes import TOLERANCE, lengths

TABLE = "table_class_prototypes"
COUNTS = "table_class_counts"
VERSIONS = "table_class_versions"
GLOBAL = "class_prototypes"
VALID = "class_prototypes_valid"

#: Maximum accepted root mean square of the entries of an unbounded output. Losses pull codes to -1 and 1 and common
#: spaces to a few units: honest means stay near 1 on every base, and below 30 if features are thirty times too long.
#: Adam's steps do not grow with the gradient, so a forged row of this size spoils a mean but not the run. Plain SGD's
#: do, and no bound that leaves room for honest silos makes SGD safe at every learning rate.
LOOSE = 1e2
#: Maximum samples per row, so that sums over all silos of a run fit in int64.
MOST_SAMPLES = (1 << 31) - 1


def class_means(features: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Means [C, d] of each class (FedProto eq 3), zero without a sample, and their counts int64 [C].

    Args:
        features: [n, d].
        members: 0/1 [n, C]; a sample with several labels counts in each of its classes.
    """
    counts = members.sum(0)
    means = members.to(features.dtype).T @ features / counts.clamp(min=1)[:, None].to(features.dtype)
    return means, counts.long()


def global_means(prototypes: Tensor, counts: Tensor, *, weighted: bool) -> tuple[Tensor, Tensor]:
    """Average the silos' prototypes [K, C, d], class by class, over the silos that have the class (FedProto eq 6).

    Counts [K, C] are 0 where a silo lacks a class. ``weighted`` weights by them, as in the paper; otherwise silos weigh
    equally, as in its code.

    Returns:
        [C, d], zero for classes that no silo has, and bool [C], whether any silo has the class.
    """
    weights = (counts if weighted else counts > 0).to(prototypes.dtype)
    total = (prototypes * weights[..., None]).sum(0)
    return total / weights.sum(0).clamp(min=1)[:, None], (counts > 0).any(0)


@dataclass(frozen=True)
class Shared:
    """Global prototypes at a silo, on the model's device."""

    image: Tensor  # float32 [C, d]
    text: Tensor  # float32 [C, d]
    image_valid: Tensor  # bool [C]
    text_valid: Tensor  # bool [C]


def payload(prototypes: Tensor, counts: Tensor, modality: str = "both") -> ClassPrototypes:
    """Wire payload of prototypes [rows, d] with counts [rows]."""
    rows = prototypes.detach().cpu().float().contiguous().numpy()
    return ClassPrototypes(rows, counts.cpu().to(torch.int64).numpy(), modality)


def of_features(features: Sequence[Tensor | None], members: Tensor, dim: int) -> ClassPrototypes:
    """Wire payload of a silo's prototypes of both modalities; rows of a missing modality are absent.

    Args:
        features: features of images and of texts, [n, d] each; None for a modality that the silo lacks.
        members: 0/1 [n, C].
        dim: d.
    """
    absent = torch.zeros(members.shape[1], dim), torch.zeros(members.shape[1], dtype=torch.int64)
    both = [absent if rows is None else class_means(rows, members) for rows in features]
    means, counts = zip(*both, strict=True)
    return payload(torch.cat(means), torch.cat(counts))


def download(tensors: Mapping[str, Tensor]) -> ClassPrototypes:
    """Download payload of the global prototypes."""
    return payload(tensors[GLOBAL], tensors[VALID])


def read_download(received: ClassPrototypes, device: torch.device) -> Shared:
    """Read the global prototypes at a silo."""
    image, text = as_tensor(received.prototypes).to(device).chunk(2)
    image_valid, text_valid = torch.from_numpy(np.asarray(received.counts) > 0).to(device).chunk(2)
    return Shared(image, text, image_valid, text_valid)


def initial(silos: int, rows: int, dim: int) -> dict[str, Tensor]:
    """An empty table of K silos and no global prototypes; ``rows`` is C, or 2 C for two modalities."""
    return {
        TABLE: torch.zeros(silos, rows, dim),
        COUNTS: torch.zeros(silos, rows, dtype=torch.int64),
        VERSIONS: torch.full((silos,), -1, dtype=torch.int64),
        GLOBAL: torch.zeros(rows, dim),
        VALID: torch.zeros(rows, dtype=torch.bool),
    }


def longest_code(context: Context) -> float:
    """Upper bound on the length of codes under the run's base objective, and thus of their means.

    1 for the unit-length embeddings of ``info_nce``, sqrt(d) if both towers end in tanh, otherwise
    :func:`longest_output`.
    """
    base = context.objective.base
    if base == "info_nce":
        return 1.0
    # DSCMR's network has no plan; its common space has no tanh.
    plans = plans_of(context.objective)
    squashed = plans is not None and all(plan.tanh for plan in plans)
    return math.sqrt(context.dim) if squashed else longest_output(context.dim)


def longest_output(dim: int) -> float:
    """Largest accepted length of an unbounded last layer's output [d], see :data:`LOOSE`."""
    return LOOSE * math.sqrt(dim)


def check_rows(sent: ClassPrototypes, rows: int, dim: int, longest: float = 1.0) -> None:
    """Validate a reply's prototypes, float32 [rows, dim], and counts int64 [rows], by the expected shape.

    ``longest`` is the maximum length of the features they are means of, see :func:`longest_code`; 1 for unit vectors.

    Raises:
        RemoteWireError: ``layout`` for a wrong number of rows or columns; ``malformed`` for a row longer than
            ``longest``, absent rows included, or a count above :data:`MOST_SAMPLES`.
    """
    if sent.prototypes.shape != (rows, dim):
        raise RemoteWireError("layout", f"class prototypes of shape {sent.prototypes.shape}, expected ({rows}, {dim})")
    length, bound = float(lengths(sent.prototypes).max()), longest * (1 + TOLERANCE)
    if length > bound:
        raise RemoteWireError("malformed", f"a class prototype of length {length:.4g}, allowed: at most {bound:.4g}")
    if (count := int(sent.counts.max())) > MOST_SAMPLES:
        raise RemoteWireError("malformed", f"a class prototype of {count} samples, allowed: at most {MOST_SAMPLES}")


def rows_of_owned_modalities(reply: Update) -> ClassPrototypes:
    """A reply's prototypes, with counts set to 0 for a modality that the silo lacks."""
    sent = take(reply.payloads, ClassPrototypes)
    half = len(sent.counts) // 2
    counts = np.array(sent.counts)
    counts[:half] *= reply.silo.image
    counts[half:] *= reply.silo.text
    return replace(sent, counts=counts)


def updated(
    tensors: Mapping[str, Tensor],
    replies: Sequence[tuple[Update, ClassPrototypes]],
    version: int,
    *,
    max_age: int | None,
    weighted: bool,
) -> dict[str, Tensor]:
    """Table and global prototypes after a merge of replies in the fixed silo order.

    The table is from :func:`initial` or an earlier merge. Replies older than their silo's entry are ignored; entries
    older than ``max_age`` versions are not in use. ``version`` is that of the model before this merge; ``weighted`` as
    in :func:`global_means`.
    """
    sent = [(as_tensor(each.prototypes), as_tensor(each.counts)) for _, each in replies]
    values = {TABLE: [rows for rows, _ in sent], COUNTS: [counts for _, counts in sent]}
    table = updated_table(tensors, [reply for reply, _ in replies], VERSIONS, values)
    alive = torch.where(still_known(table[VERSIONS], version, max_age)[:, None], table[COUNTS], 0)
    means, valid = global_means(table[TABLE].double(), alive, weighted=weighted)
    return {**table, GLOBAL: means.float(), VALID: valid}


def summed(context: Context, rows: int, longest: float) -> Mapping[type[Payload], SummedRows]:
    """The class prototypes of replies in a secure sum; arguments as for :func:`check_rows`."""
    return {ClassPrototypes: SummedRows(rows, context.dim, longest * (1 + TOLERANCE))}


def updated_by_sum(tensors: Mapping[str, Tensor], means: Mapping[str, Tensor], layout: SumLayout) -> dict[str, Tensor]:
    """Global prototypes after a secure sum: the means over its silos, while other rows stay as they are.

    There is no table: the coordinator knows no single silo's prototypes, so those of earlier rounds do not count.
    """
    rows, known = means_of(means, layout, ClassPrototypes)
    return {GLOBAL: torch.where(known[:, None], rows.float(), tensors[GLOBAL]), VALID: tensors[VALID] | known}
