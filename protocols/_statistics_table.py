"""What RCSR's coordinator knows of its silos: the reports of a merge, and the table of everybody's last one (eq 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """What the coordinator knows of M silos, in silo order.

    Args:
        prototypes: float32 [M, 2, d], zero where the silo lacks the modality.
        mask: bool [M, 2].
        geometry: float32 [M, 4].
        losses: float64 [M].
    """

    prototypes: Tensor
    mask: Tensor
    geometry: Tensor
    losses: Tensor


def updated_table(
    tensors: Mapping[str, Tensor], rows: Tensor, statistics: Statistics, versions: Sequence[int]
) -> dict[str, Tensor]:
    """The table of last-known statistics after a merge; a reply older than the entry leaves it alone.

    Args:
        tensors: holding the table, ``table_mask`` included.
        rows: int64 [M] silo of each report.
        statistics: the reports.
        versions: [M] the version each stands on.
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
