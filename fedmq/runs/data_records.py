"""Records about the data in a run folder: ``agreement.json`` and ``report_data.json``.

The first is what each process stated about its data, and what the silos agreed on; the second a report's content beyond
the run's records, computed once from the data and the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedmq.data.splits import SPLITS
from fedmq.storage.json_files import Count, Digest, Stored
from fedmq.wire.payloads import IMAGE, TEXT, DataFormat, DataStatement

Modalities = Annotated[list[Literal["image", "text"]], Field(min_length=1, max_length=2)]


class ItemCounts(Stored):
    """Numbers of items of a split, by the modalities they have."""

    paired: Count
    image_only: Count
    text_only: Count


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


class StatedFormat(Stored):
    """Labels and model inputs; the fields are those of :class:`fedmq.wire.payloads.DataFormat`."""

    label_names: list[str]
    vocabulary: list[str]
    image_shape: list[Count]
    text_shape: list[Count]
    image_dtype: str
    text_dtype: str
    image_encoder: str
    text_encoder: str
    mean: list[float]
    std: list[float]

    @classmethod
    def of(cls, stated: DataFormat) -> StatedFormat:
        """The record of a payload."""
        return cls.model_validate({name: _plain(value) for name, value in vars(stated).items()})

    def payload(self) -> DataFormat:
        """The payload as it was sent."""
        return DataFormat(
            label_names=tuple(self.label_names),
            vocabulary=tuple(self.vocabulary),
            image_shape=np.array(self.image_shape, np.int64),
            text_shape=np.array(self.text_shape, np.int64),
            image_dtype=self.image_dtype,
            text_dtype=self.text_dtype,
            image_encoder=self.image_encoder,
            text_encoder=self.text_encoder,
            mean=np.array(self.mean, np.float32),
            std=np.array(self.std, np.float32),
        )


class StatedData(Stored):
    """What a process stated about its data."""

    data_digest: Digest  # salted digest of the data
    modalities: Modalities  # the modalities that it uses
    # Numbers of items by split; splits without items are left out.
    items: dict[Literal["train", "val", "test", "public", "database"], ItemCounts]
    format: StatedFormat | None = None  # labels and model inputs; with ``partition.kind own`` only

    @classmethod
    def of(cls, stated: DataStatement, held: DataFormat | None = None) -> StatedData:
        """The record of a statement's payloads."""
        rows = (dict(zip(ItemCounts.model_fields, row, strict=True)) for row in stated.counts.tolist())
        items = {split: row for split, row in zip(SPLITS, rows, strict=True) if any(row.values())}
        masks = (("image", IMAGE), ("text", TEXT))
        plain = {
            "data_digest": stated.data,
            "modalities": [name for name, bit in masks if stated.mask & bit],
            "items": items,
            **({} if held is None else {"format": StatedFormat.of(held)}),
        }
        return cls.model_validate(plain)

    def payload(self) -> DataStatement:
        """The statement as it was sent."""
        counts = np.zeros((len(SPLITS), 3), np.int64)
        for split, count in self.items.items():
            counts[SPLITS.index(split)] = count.paired, count.image_only, count.text_only
        mask = IMAGE * ("image" in self.modalities) + TEXT * ("text" in self.modalities)
        return DataStatement(self.data_digest, mask, counts)


class AgreementRecord(Stored):
    """``agreement.json``."""

    run: str  # the run's id, the salt of the digests
    stated: dict[str, StatedData]  # statements by process
    agreed: StatedFormat | None = None  # what the silos agreed on; with ``partition.kind own`` only
    # Silos that stated their data after the agreement, in the order in which they were included.
    late: list[str] = Field(default_factory=list)

    @classmethod
    def of(
        cls,
        run: str,
        stated: Mapping[str, tuple[DataStatement, DataFormat | None]],
        agreed: DataFormat | None = None,
        late: Sequence[str] = (),
    ) -> AgreementRecord:
        """The record of what was stated and agreed on."""
        plain = {
            "run": run,
            "stated": {name: StatedData.of(*statement) for name, statement in sorted(stated.items())},
            **({} if agreed is None else {"agreed": StatedFormat.of(agreed)}),
            **({"late": list(late)} if late else {}),
        }
        return cls.model_validate(plain)


#: A small image as part of the page; nothing else may stand there, as the page shows it unescaped by the browser.
Thumbnail = Annotated[str, Field(pattern=r"^(data:image/jpeg;base64,[A-Za-z0-9+/]+=*)?$", max_length=40_000)]
_Plane = list[Annotated[list[float], Field(min_length=2, max_length=2)]]


class ReportItem(Stored):
    """An item of an example."""

    key: str
    caption: str = ""  # a caption of it; empty if captions are not known as text
    image: Thumbnail = ""  # a thumbnail; empty if there are no images


class ReportHit(ReportItem):
    """A retrieved item."""

    right: bool  # it is the query's own item
    score: float  # cosine similarity, or share of equal bits of hash codes


class Example(Stored):
    """A query with what the released model retrieves for it."""

    way: Literal["t2i", "i2t"]
    best: bool  # one of the best cases, otherwise one of the worst
    query: ReportItem  # the query's item
    rank: int  # rank of the right item, from 1
    hits: list[ReportHit]  # the first five results


class Space(Stored):
    """Held-out pairs in the plane of the two largest principal components."""

    image: _Plane  # coordinates of the images
    text: _Plane  # coordinates of their first captions

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.image) != len(self.text):
            raise ValueError("as many points of images as of texts")
        return self


class ReportData(Stored):
    """Images, projections and holdings for a report."""

    format: Literal[1] = 1  # format version of this file
    model_digest: Digest  # digest of the model that was used
    items: int = 0  # number of held-out items in the gallery of the examples
    examples: list[Example] = Field(default_factory=list)  # queries with their results
    before: Space | None = None  # the space before training; None if it was not computed
    after: Space | None = None  # the space of the released model
    classes: list[str] = Field(default_factory=list)  # names of the data's labels
    # Number of each silo's training items with each label, by silo.
    holdings: dict[str, list[int]] = Field(default_factory=dict)
    # Where the split comes from, what was not read, and what is probably unintended, a line each.
    notes: list[str] = Field(default_factory=list)
