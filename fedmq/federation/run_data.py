"""What all processes of a run know about its data: the silos, the shapes of the inputs, and the labels' names.

In a simulated partition it follows from the data set, which every process has. With ``partition.kind own`` the silos
state it and the coordinator sends every process what they agree on (:mod:`fedmq.federation.agreement`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Scenario
from fedmq.config.sections import Modality
from fedmq.data.label_levels import trained_columns
from fedmq.data.silo_dataset import SiloDataset
from fedmq.data.splits import SPLITS
from fedmq.encoders.base import InputSpec
from fedmq.federation.protocol import Context, SiloFacts
from fedmq.models.build import build_towers
from fedmq.models.objective_registry import OBJECTIVES
from fedmq.models.two_tower import TwoTower

#: Numbers of items int64 [5, 3]: of each split (``SPLITS``) with both modalities, an image only, and captions only.
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainingItems:
    """Numbers of a silo's training items.

    Args:
        dataset: items with all of the silo's modalities; in a silo with both, its pairs.
        image_only: further items of a silo with both modalities, with an image only.
        text_only: likewise, with captions only.
        all: all of them, and those without any of the silo's modalities.
    """

    dataset: int
    image_only: int
    text_only: int
    all: int


@dataclass(frozen=True)
class RunData:
    """Facts about the data of a run.

    Args:
        silos: facts of each silo, in a fixed order.
        inputs: shapes and dtypes of the model inputs.
        label_names: names of the labels, in order; empty if there are none.
        cache: cache folder, which holds shared weights.
        vocabulary: words of the bags of words, in order; empty in a simulated partition, and for other texts.
        labelled: whether a training item has a label.
        digest: digest (hex) of the data, which a resumed run must find again.
        content: digest (hex) of what does not depend on the machine, which is released with the model.
        counts: numbers of items, by silo; of a silo with own data only its own.
        evaluated: numbers of evaluated items and of their captions; None if only the evaluator has them.
        heldout_without_pair: items of the evaluated split that lack a modality and are not evaluated.
        encoders: digests of the frozen encoders of the data, by modality; none for features from a file.
        public: loads the public items, which belong to no silo; returns None if there are none.
    """

    silos: tuple[SiloFacts, ...]
    inputs: InputSpec
    label_names: tuple[str, ...]
    cache: Path
    vocabulary: tuple[str, ...] = ()
    labelled: bool = True
    digest: str = ""
    content: str = ""
    counts: Mapping[str, Counts] = field(default_factory=dict)
    evaluated: tuple[int, int] | None = None
    heldout_without_pair: int = 0
    encoders: Mapping[str, str] = field(default_factory=dict)
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

    def build_model(self, scenario: Scenario, device: str, modalities: tuple[Modality, ...]) -> TwoTower:
        """Build the two towers with their initial parameters, and the frozen encoders of the given modalities."""
        return build_towers(
            scenario.backbone,
            scenario.objective,
            self.inputs,
            self.label_names,
            scenario.seed,
            device,
            modalities,
            cache=self.cache,
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
            public=self.public,
            build=partial(self.build_model, scenario, "cpu", ("image", "text")),
        )

    def label_columns(self, scenario: Scenario) -> list[int]:
        """Columns of the labels that the scenario's objective trains on."""
        kind = OBJECTIVES.find(scenario.objective.base)
        return trained_columns(self.label_names, both_levels=kind.both_levels)
