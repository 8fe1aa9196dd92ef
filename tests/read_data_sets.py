"""A reader's result in a comparable form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedmq.config.scenario import Data
from fedmq.data.catalogue import SETS
from fedmq.data.raw_set import RawSet
from fedmq.data.splits import SPLITS


def read(name: str, path: Path, **options: Any) -> RawSet:
    data = Data(name=name, path=path, **options)
    return SETS[name].read(data)


def words(found: RawSet) -> list[str]:
    assert found.split is not None
    return [SPLITS[code] for code in found.split]


def labels_of(found: RawSet, row: int) -> list[str]:
    assert found.labels is not None
    return [name for name, hot in zip(found.label_names, found.labels[row], strict=True) if hot]


# --- manifest -------------------------------------------------------------------------------------------------------

ROWS = [
    {"image": "a.png", "captions": ["one", "two"], "labels": ["x", "y"], "split": "train"},
    {"image": "in/b.png", "caption": "three", "labels": "y", "split": "test"},
]
