"""What all processes of a run know about its data, and the agreement of silos that share only messages.

In a simulated partition these facts follow from the data set, which every process has. With ``partition.kind own`` a
silo states its modalities, its numbers of items, a salted digest of its data, and the format of its labels and inputs.
Formats agree if they have the same input shapes and encoders. Label names may differ: the agreed labels are the list
that all silos have, or else the sorted union, to which each silo maps its columns. The same holds for the vocabulary of
bags of words. Columns without names (``label-000``, ...) must have the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.config.scenario import Scenario
from fedmq.config.sections import Modality
from fedmq.data.item_digests import ItemDigests, salted_digest
from fedmq.data.labels import trained_columns
from fedmq.data.prepared_arrays import Prepared, Present
from fedmq.data.silo_dataset import SiloDataset, modalities_held
from fedmq.data.splits import SPLITS
from fedmq.encoders.base import InputSpec, stated_digest
from fedmq.errors import FedmqError
from fedmq.federation.protocol import Context, SiloFacts
from fedmq.models.build import build
from fedmq.models.objective_registry import OBJECTIVES
from fedmq.models.two_tower import TwoTower
from fedmq.wire.payloads import IMAGE, TEXT, DataFormat, DataStatement, SiloModalities

#: Numbers of items int64 [5, 3]: of each split (``SPLITS``) with both modalities, an image only, and captions only.
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainingItems:
    """Numbers of a silo's training items."""

    dataset: int  # items with all of the silo's modalities; in a silo with both, its pairs
    image_only: int  # further items of a silo with both modalities, with an image only
    text_only: int  # likewise, with captions only
    all: int  # all of them, and those without any of the silo's modalities


@dataclass(frozen=True)
class RunData:
    """Facts about the data of a run."""

    silos: tuple[SiloFacts, ...]  # facts of each silo, in a fixed order
    inputs: InputSpec  # shapes and dtypes of the model inputs
    label_names: tuple[str, ...]  # names of the labels, in order; empty if there are none
    cache: Path  # cache folder, which holds shared weights
    # Words of the bags of words, in order; empty in a simulated partition, and for other texts.
    vocabulary: tuple[str, ...] = ()
    labelled: bool = True  # whether a training item has a label
    digest: str = ""  # digest (hex) of the data, which a resumed run must find again
    content: str = ""  # digest (hex) of what does not depend on the machine, which is released with the model
    # Numbers of items, by silo; of a silo with own data only its own.
    counts: Mapping[str, Counts] = field(default_factory=dict)
    # Numbers of evaluated items and of their captions; None if only the evaluator has them.
    evaluated: tuple[int, int] | None = None
    # Jensen-Shannon divergence [bits] of a silo's labels from those of all silos; empty without labels, or if the silos
    # have their own data.
    label_divergence: Mapping[str, float] = field(default_factory=dict)
    heldout_without_pair: int = 0  # items of the evaluated split that lack a modality and are not evaluated
    # Digests of the frozen encoders of the data, by modality; none for features from a file.
    encoders: Mapping[str, str] = field(default_factory=dict)
    # Loads the public items, which belong to no silo; returns None if there are none.
    public: Callable[[], SiloDataset | None] = field(default=lambda: None, compare=False)

    @cached_property
    def _by_name(self) -> dict[str, SiloFacts]:
        return {silo.name: silo for silo in self.silos}

    def facts(self, name: str) -> SiloFacts:
        """Facts of one silo."""
        return self._by_name[name]

    def training_items(self, silo: SiloFacts) -> TrainingItems:
        """A silo's training items by what the silo can use of them.

        Args:
            silo: with the modalities that it has at the time.
        """
        paired, image_only, text_only = self.counts[silo.name][SPLITS.index("train")].tolist()
        if silo.paired:
            return TrainingItems(paired, image_only, text_only, paired + image_only + text_only)
        alone = image_only if silo.image else text_only
        return TrainingItems(paired + alone, 0, 0, paired + image_only + text_only)

    def trained(self, silo: SiloFacts, unpaired: Literal["ignored", "anchored"]) -> int:
        """Number of a silo's items that a method trains on, by the ``unpaired`` of its traits."""
        found = self.training_items(silo)
        return found.dataset + (found.image_only + found.text_only) * (unpaired == "anchored")

    def pairs(self, split: str) -> tuple[int, ...]:
        """Number of items of a split that have both modalities, of each silo."""
        return tuple(int(self.counts[silo.name][SPLITS.index(split), 0]) for silo in self.silos)

    def build_model(
        self, scenario: Scenario, device: str, modalities: tuple[Modality, ...], *, initial: bool = True
    ) -> TwoTower:
        """Build the two towers, by default with their initial parameters, and frozen encoders of some modalities."""
        return build(
            scenario.backbone,
            self.inputs,
            scenario.seed,
            objective=scenario.objective,
            label_names=self.label_names,
            device=device,
            modalities=modalities,
            cache=self.cache,
            initial=initial,
        )

    def context(self, scenario: Scenario, model: TwoTower) -> Context:
        """The context for both halves of a method."""
        return Context(
            scenario.seed,
            scenario.schedule_rounds,
            self.silos,
            model.layout,
            model.dim,
            scenario.training,
            scenario.objective,
            tuple(self.label_names[column] for column in self.label_columns(scenario)),
            max_age=scenario.aggregation.max_age,
            items=scenario.privacy.items,
            public=self.public,
            build=partial(self.build_model, scenario, "cpu", ("image", "text")),
        )

    def label_columns(self, scenario: Scenario) -> list[int]:
        """Columns of the labels that the scenario's objective trains on."""
        kind = OBJECTIVES.find(scenario.objective.base)
        return trained_columns(self.label_names, both_levels=kind.both_levels)


_UNNAMED = re.compile(r"label-\d{3,}")
_NONE = "none"


class FormatError(FedmqError):
    """Two silos' data do not fit together; the text names what differs."""


def mask_of(*, image: bool, text: bool) -> int:
    """The modalities as the wire has them."""
    return IMAGE * image + TEXT * text


def counts_of(prepared: Prepared, rows: Sequence[int] | np.ndarray, present: Present) -> Counts:
    """Numbers of items by split, with both modalities, an image only, and captions only: int64 [5, 3].

    ``rows`` are those of the items; ``present`` bool [n, 2] are the modalities of each item of the data set.
    """
    chosen = np.asarray(rows, np.int64)
    image, text = np.asarray(present)[chosen].T
    columns = [image & text, image & ~text, text & ~image]
    split = prepared.split[chosen]
    return np.stack([np.bincount(split[each], minlength=len(SPLITS)) for each in columns], axis=1).astype(np.int64)


def usable(counts: Counts, *, image: bool, text: bool) -> Counts:
    """Numbers of items, of which their holder uses some modalities only: int64 [5, 3]."""
    if image and text:
        return counts
    found = np.zeros_like(counts)
    column = 1 if image else 2
    found[:, column] = counts[:, 0] + counts[:, column]
    return found


def held_by(prepared: Prepared, *, image: bool, text: bool) -> tuple[bool, bool]:
    """The modalities that a silo with its own data trains, among those it may use: (image, text)."""
    return modalities_held(prepared.rows("train"), prepared.present, image=image, text=text)


def stated_alone(prepared: Prepared, items: ItemDigests, run: str, *, image: bool, text: bool) -> DataStatement:
    """The statement of a process about its own data, of which it may use only some modalities."""
    counts = usable(counts_of(prepared, np.arange(prepared.n), prepared.present), image=image, text=text)
    digest = salted_digest(items, run, image=image, text=text)
    return DataStatement(digest, mask_of(image=image, text=text), counts)


def encoders_of(prepared: Prepared) -> dict[str, str]:
    """Digests of the frozen encoders that encoded a data set, by modality."""
    weights = prepared.meta.source.get("weights")
    found = dict(zip(("image", "text"), weights, strict=True)) if isinstance(weights, list) else {}
    return {modality: value for modality, value in found.items() if isinstance(value, str)}


def format_of(prepared: Prepared, *, image: bool, text: bool) -> DataFormat:
    """The format of a data set, without that of a modality which its holder does not use."""
    inputs, source = prepared.inputs, prepared.meta.source
    encoders = encoders_of(prepared)
    return DataFormat(
        label_names=prepared.label_names,
        vocabulary=prepared.vocabulary if text else (),
        image_shape=np.array(inputs.image_shape if image else (), np.int64),
        text_shape=np.array(inputs.text_shape if text else (), np.int64),
        image_dtype=inputs.image_dtype if image else _NONE,
        text_dtype=inputs.text_dtype if text else _NONE,
        image_encoder=_encoder(encoders.get("image"), source.get("later")) if image else _NONE,
        text_encoder=_encoder(encoders.get("text"), None) if text else _NONE,
        mean=np.array(inputs.mean if image else (), np.float32),
        std=np.array(inputs.std if image else (), np.float32),
    )


def _encoder(digest: str | None, later: object) -> str:
    return _NONE if digest is None else stated_digest(digest, later if isinstance(later, str) else "")


#: Fields of a format that must be the same in all silos with the modality, and what they are called.
_SAME = {
    "image": (
        ("image_shape", "image features of width"),
        ("image_dtype", "image inputs of type"),
        ("image_encoder", "an image encoder with digest"),
        ("mean", "pixel means"),
        ("std", "pixel deviations"),
    ),
    "text": (
        ("text_shape", "text features of width"),
        ("text_dtype", "text inputs of type"),
        ("text_encoder", "a text encoder and tokenizer with digest"),
    ),
}


def difference(name: str, stated: DataFormat, other: str, reference: DataFormat) -> str | None:
    """What makes two silos' formats incompatible, in words for both operators; None if they fit together."""
    for modality, fields in _SAME.items():
        if _NONE in (getattr(stated, f"{modality}_dtype"), getattr(reference, f"{modality}_dtype")):
            continue
        for part, what in fields:
            if part == "text_shape" and stated.vocabulary and reference.vocabulary:
                continue
            here, there = _shown(getattr(stated, part)), _shown(getattr(reference, part))
            if here != there:
                return f"{name} has {what} {here}, {other} has {there}"
    return _labels_differ(name, stated.label_names, other, reference.label_names)


def _labels_differ(name: str, stated: Sequence[str], other: str, reference: Sequence[str]) -> str | None:
    unnamed = [bool(names) and all(map(_UNNAMED.fullmatch, names)) for names in (stated, reference)]
    if not any(unnamed) or not (stated and reference):
        return None
    if all(unnamed):
        if tuple(stated) == tuple(reference):
            return None
        held, others = (f"{len(each)} ({each[0]} to {each[-1]})" for each in (stated, reference))
        what = f"{name} has {held} label columns without names, {other} has {others}"
    else:
        first, second = (name, other) if unnamed[0] else (other, name)
        what = f"{first} has label columns without names, {second} has names"
    return f"{what}; give every file label_names"


def unknown_name(name: str, stated: DataFormat, agreed: DataFormat) -> str | None:
    """A label or word of a silo that is not among those agreed on, in words for its operator; None without any."""
    for what, held, known in (
        ("label", stated.label_names, agreed.label_names),
        ("word of the vocabulary", stated.vocabulary, agreed.vocabulary),
    ):
        strange = sorted(set(held) - set(known))
        if strange:
            more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
            return f"{name} has the {what} {strange[0]!r}{more}"
    return None


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray):
        return " x ".join(f"{each:g}" for each in value.tolist()) or _NONE
    return str(value)[:16]


def agreed_format(stated: Mapping[str, DataFormat]) -> DataFormat:
    """The format that all silos agree on; ``stated`` has each silo's format, in the order of the silos.

    Raises:
        FormatError: two do not fit together, or a modality is in no silo.
    """
    (first, merged), *others = stated.items()
    for name, each in others:
        if (wrong := difference(name, each, first, merged)) is not None:
            raise FormatError(wrong)
        for modality, fields in _SAME.items():
            if getattr(merged, f"{modality}_dtype") == _NONE:
                merged = replace(merged, **{part: getattr(each, part) for part, _ in fields})
    for modality in _SAME:
        if getattr(merged, f"{modality}_dtype") == _NONE:
            what = "images" if modality == "image" else "captions"
            raise FormatError(f"no silo has {what}; retrieval needs both")
    vocabulary = _union([each.vocabulary for each in stated.values() if each.vocabulary])
    shape = np.array([len(vocabulary)], np.int64) if vocabulary else merged.text_shape
    labels = _union([each.label_names for each in stated.values() if each.label_names])
    return replace(merged, label_names=labels, vocabulary=vocabulary, text_shape=shape)


def _union(lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The list that all have, or the sorted union of different lists."""
    different = list(dict.fromkeys(lists))
    if len(different) <= 1:
        return different[0] if different else ()
    return tuple(sorted({name for names in different for name in names}))


def silos_of(names: Sequence[str], modalities: SiloModalities, counts: Mapping[str, Counts]) -> tuple[SiloFacts, ...]:
    """The silos of a run: those without ``modalities`` have stated no data yet; unpaired items as far as counted."""
    masks, silos = dict(zip(modalities.silos, modalities.masks.tolist(), strict=True)), list[SiloFacts]()
    for index, name in enumerate(names):
        image, text = bool(masks.get(name, 0) & IMAGE), bool(masks.get(name, 0) & TEXT)
        alone = counts[name][SPLITS.index("train"), 1:].tolist() if image and text and name in counts else (0, 0)
        silos.append(SiloFacts(name, index, image, text, *alone))
    return tuple(silos)


def run_data_of(
    names: Sequence[str],
    agreed: DataFormat,
    modalities: SiloModalities,
    cache: Path,
    counts: Mapping[str, Counts],
    digest: str = "",
    content: str = "",
) -> RunData:
    """The facts about the run's data that an agreement contains; counts and digests (hex) as far as known."""
    encoders = {"image": agreed.image_encoder, "text": agreed.text_encoder}
    return RunData(
        silos_of(names, modalities, counts),
        InputSpec.of(agreed),
        agreed.label_names,
        cache,
        agreed.vocabulary,
        digest=digest,
        content=content,
        counts=counts,
        encoders={modality: value for modality, value in encoders.items() if value != _NONE},
    )


def as_agreed(dataset: SiloDataset, prepared: Prepared, agreed: RunData) -> SiloDataset:
    """A silo's dataset, taken from ``prepared``, with the columns of the agreed labels and vocabulary."""
    labels, text = dataset.labels, dataset.text
    if prepared.label_names != agreed.label_names:
        labels = spread(labels, len(dataset), prepared.label_names, agreed.label_names)
    if text is not None and prepared.vocabulary != agreed.vocabulary:
        values = spread(text.values, len(text.values), prepared.vocabulary, agreed.vocabulary)
        text = replace(text, values=values)
    return replace(dataset, labels=labels, text=text)


def spread(values: Tensor | None, n: int, names: Sequence[str], agreed: Sequence[str]) -> Tensor:
    """Columns [n, ..., L] in their agreed places [n, ..., A]; columns that the data set lacks are 0.

    ``names`` are those of the L columns, all of them agreed; without values the zeros are uint8.
    """
    if values is None:
        return torch.zeros((n, len(agreed)), dtype=torch.uint8)
    place = {name: column for column, name in enumerate(agreed)}
    spread = values.new_zeros((*values.shape[:-1], len(agreed)))
    spread[..., [place[name] for name in names]] = values
    return spread
