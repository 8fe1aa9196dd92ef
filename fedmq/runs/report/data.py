"""``report_data.json``: a report's content beyond the run's records, computed once from the data and the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedmq.storage.json_files import Digest, Stored

#: A small image as part of the page; nothing else may stand there, as the page shows it unescaped by the browser.
Thumbnail = Annotated[str, Field(pattern=r"^(data:image/jpeg;base64,[A-Za-z0-9+/]+=*)?$", max_length=40_000)]
_Plane = list[Annotated[list[float], Field(min_length=2, max_length=2)]]


class ReportItem(Stored):
    """An item of an example.

    Args:
        key: the item's name.
        caption: a caption of it; empty if captions are not known as text.
        image: a thumbnail; empty if there are no images.
    """

    key: str
    caption: str = ""
    image: Thumbnail = ""


class ReportHit(ReportItem):
    """A retrieved item.

    Args:
        right: it is the query's own item.
        score: cosine similarity, or share of equal bits of hash codes.
    """

    right: bool
    score: float


class Example(Stored):
    """A query with what the released model retrieves for it.

    Args:
        way: ``t2i`` or ``i2t``.
        best: one of the best cases, otherwise one of the worst.
        query: the query's item.
        rank: rank of the right item, from 1.
        hits: the first five results.
    """

    way: Literal["t2i", "i2t"]
    best: bool
    query: ReportItem
    rank: int
    hits: list[ReportHit]


class Space(Stored):
    """Held-out pairs in the plane of the two largest principal components.

    Args:
        image: coordinates of the images.
        text: coordinates of their first captions.
    """

    image: _Plane
    text: _Plane


class ReportData(Stored):
    """Images, projections and holdings for a report.

    Args:
        format: format version of this file.
        model_digest: digest of the model that was used.
        items: number of held-out items in the gallery of the examples.
        examples: queries with their results.
        before: the space before training; None if it was not computed.
        after: the space of the released model.
        classes: names of the data's labels.
        holdings: number of each silo's training items with each label, by silo.
    """

    format: Literal[1] = 1
    model_digest: Digest
    items: int = 0
    examples: list[Example] = Field(default_factory=list)
    before: Space | None = None
    after: Space | None = None
    classes: list[str] = Field(default_factory=list)
    holdings: dict[str, list[int]] = Field(default_factory=dict)
