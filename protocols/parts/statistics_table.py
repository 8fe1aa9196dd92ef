"""Silo statistics at RCSR's coordinator: the reports of a merge, and the table of every silo's last report (eq 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """Statistics of M silos, in silo order.

    Args:
        prototypes: float32 [M, 2, d], zero for modalities the silo lacks.
        mask: bool [M, 2], which prototypes are real.
        geometry: float32 [M, 4], see :func:`protocols.parts.router.geometry`.
        losses: float64 [M].
    """

    prototypes: Tensor
    mask: Tensor
    geometry: Tensor
    losses: Tensor


def updated_table(
    tensors: Mapping[str, Tensor], rows: Tensor, statistics: Statistics, versions: Sequence[int]
) -> dict[str, Tensor]:
    """The table of last-known statistics after a merge; replies older than a silo's entry are ignored.

    Args:
        tensors: with the table's ``table_*`` tensors.
        rows: int64 [M] silo of each report.
        statistics: the reports.
        versions: [M] base version of each report.
    """
    table = {name: tensors[name].clone() for name in tensors if name.startswith("table_")}
    for at, (row, version) in enumerate(zip(rows.tolist(), versions, strict=True)):
        if version < int(table["table_versions"][row]):
            continue
        table["table_versions"][row] = version
        table["table_prototypes"][row] = statistics.prototypes[at]
        table["table_mask"][row] = statistics.mask[at]
        table["table_geometry"][row] = statistics.geometry[at]
        table["table_losses"][row] = statistics.losses[at]
    return table
