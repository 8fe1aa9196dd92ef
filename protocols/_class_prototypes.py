"""Class prototypes: silos' means per class and modality, the coordinator's table of them, and what goes down again.

On the wire both modalities' prototypes of C classes are one payload of 2 C rows, ``modality: both``: images' rows
first, then texts'. A row of count 0 is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmq.errors import RemoteWireError
from fedmq.messages import ClassPrototypes
from fedmq.protocol import Reply
from protocols._merge import as_tensor

TABLE = "table_class_prototypes"
COUNTS = "table_class_counts"
VERSIONS = "table_class_versions"
GLOBAL = "class_prototypes"
VALID = "class_prototypes_valid"


def class_means(features: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """A silo's prototypes: the mean feature of each class (FedProto eq 3).

    Args:
        features: [n, d].
        members: 0/1 [n, C]; a sample with several labels counts in each of its classes.

    Returns:
        Means [C, d], zero where a class has no sample, and counts int64 [C].
    """
    counts = members.sum(0)
    means = members.to(features.dtype).T @ features / counts.clamp(min=1)[:, None].to(features.dtype)
    return means, counts.long()


def global_means(prototypes: Tensor, counts: Tensor, *, weighted: bool) -> tuple[Tensor, Tensor]:
    """The silos' prototypes averaged class by class over those that have the class (FedProto eq 6).

    Args:
        prototypes: [K, C, d].
        counts: [K, C], 0 where a silo lacks a class.
        weighted: by samples, as the paper prints it; equally, as its code does, if false.

    Returns:
        [C, d], zero where nobody has the class, and bool [C], whether anybody does.
    """
    weights = (counts if weighted else counts > 0).to(prototypes.dtype)
    total = (prototypes * weights[..., None]).sum(0)
    return total / weights.sum(0).clamp(min=1)[:, None], (counts > 0).any(0)


@dataclass(frozen=True)
class Shared:
    """Global prototypes at a silo, on the model's device.

    Args:
        image: float32 [C, d].
        text: float32 [C, d].
        image_valid: bool [C].
        text_valid: bool [C].
    """

    image: Tensor
    text: Tensor
    image_valid: Tensor
    text_valid: Tensor


def payload(prototypes: Tensor, counts: Tensor, modality: str = "both") -> ClassPrototypes:
    """Prototypes [rows, d] with counts [rows] as they travel."""
    rows = prototypes.detach().cpu().float().contiguous().numpy()
    return ClassPrototypes(rows, counts.cpu().to(torch.int64).numpy(), modality)


def download(tensors: Mapping[str, Tensor]) -> ClassPrototypes:
    """The global prototypes as a payload."""
    return payload(tensors[GLOBAL], tensors[VALID])


def read_download(received: ClassPrototypes, device: torch.device) -> Shared:
    """The global prototypes at a silo."""
    image, text = as_tensor(received.prototypes).to(device).chunk(2)
    image_valid, text_valid = torch.from_numpy(np.asarray(received.counts) > 0).to(device).chunk(2)
    return Shared(image, text, image_valid, text_valid)


def initial(silos: int, classes: int, dim: int) -> dict[str, Tensor]:
    """An empty table of K silos and no global prototype yet, for C classes in two modalities."""
    rows = 2 * classes
    return {
        TABLE: torch.zeros(silos, rows, dim),
        COUNTS: torch.zeros(silos, rows, dtype=torch.int64),
        VERSIONS: torch.full((silos,), -1, dtype=torch.int64),
        GLOBAL: torch.zeros(rows, dim),
        VALID: torch.zeros(rows, dtype=torch.bool),
    }


def check_rows(found: ClassPrototypes, rows: int, dim: int) -> None:
    """Check a reply's prototypes against what the run expects.

    Raises:
        RemoteWireError: another number of rows or columns.
    """
    if found.prototypes.shape != (rows, dim):
        raise RemoteWireError("layout", f"class prototypes of shape {found.prototypes.shape}, here ({rows}, {dim})")


def updated(
    tensors: Mapping[str, Tensor],
    replies: Sequence[tuple[Reply, ClassPrototypes]],
    version: int,
    *,
    max_age: int | None,
    weighted: bool,
) -> dict[str, Tensor]:
    """Table and global prototypes after a merge; a reply older than its silo's entry leaves the entry alone.

    Args:
        tensors: of :func:`initial` or a merge before.
        replies: in the fixed silo order, each with its prototypes.
        version: of the model before this merge.
        max_age: versions after which an entry no longer counts; None keeps all.
        weighted: see :func:`global_means`.

    Raises:
        RemoteWireError: prototypes of another shape.
    """
    table, counts, versions = (tensors[name].clone() for name in (TABLE, COUNTS, VERSIONS))
    for reply, found in replies:
        check_rows(found, table.shape[1], table.shape[2])
        row = reply.silo.index
        if reply.base_version < int(versions[row]):
            continue
        table[row], counts[row] = as_tensor(found.prototypes), as_tensor(found.counts)
        versions[row] = reply.base_version
    old = torch.zeros_like(versions, dtype=torch.bool) if max_age is None else version - versions > max_age
    alive = torch.where(old[:, None], 0, counts)
    means, valid = global_means(table.double(), alive, weighted=weighted)
    return {TABLE: table, COUNTS: counts, VERSIONS: versions, GLOBAL: means.float(), VALID: valid}
