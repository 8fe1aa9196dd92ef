"""The population of a run: the prepared data, its partition among silos, and the silos' modalities.

Every process of a run builds the same population from the scenario. Costly parts (features, clusters) are computed once
and kept in the cache, where manually launched silos find them, too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from fedmq.config.plug_ins import label
from fedmq.config.run_id import facts_of, name_of
from fedmq.config.scenario import DEVICE, Scenario
from fedmq.config.sections import MissingModality, Modality
from fedmq.data import partition
from fedmq.data.extract import ExtractionPlan
from fedmq.data.item_digests import ItemDigests, salted_digest
from fedmq.data.labels import fine_columns, label_divergences
from fedmq.data.prepare import prepare, text_features
from fedmq.data.prepared_arrays import Prepared, Present, open_prepared
from fedmq.data.silo_dataset import (
    SiloDataset,
    SiloRows,
    load_silo_dataset,
    modalities_held,
    silo_rows,
    without_dropped,
)
from fedmq.encoders.gpu import make_gpu_repeatable
from fedmq.errors import InputError, RunError
from fedmq.federation.agreement import Counts, RunData, as_agreed, counts_of, encoders_of, mask_of, usable
from fedmq.federation.protocol import Context, SiloFacts
from fedmq.models.two_tower import TwoTower
from fedmq.profiling import span
from fedmq.seeds import numpy_generator
from fedmq.storage.cache import cache_folder
from fedmq.storage.locks import locked
from fedmq.storage.run_folder import write_atomically
from fedmq.wire.messages import EVALUATOR
from fedmq.wire.payloads import DataStatement

I64 = npt.NDArray[np.int64]
Progress = Callable[[str, int, int], None]
Parts = tuple[I64, ...]
_FORMAT = 1


@dataclass(frozen=True)
class Population:
    """The data of a run and its partition among silos."""

    prepared: Prepared  # the data set as memory-mapped arrays
    silos: tuple[SiloFacts, ...]  # facts of each silo, in a fixed order
    train: tuple[I64, ...]  # training rows of each silo, also of items that lack a modality
    heldout: tuple[I64, ...]  # rows of the evaluated split assigned to each silo
    evaluated: I64  # all rows of the evaluated split whose items have both modalities; others are not evaluated
    # All rows of such items outside the evaluated split, the public split and a separate validation split.
    database: I64
    # Rows of the database assigned to each silo: its training rows, and its part of the others.
    galleries: tuple[I64, ...]
    cache: Path  # cache folder, which also holds shared weights
    # Bool [n, 2], the modalities of each item after ``missing_modality.per: item``; None if it drops none.
    dropped: Present | None = None
    # What the silos have agreed on with ``partition.kind own``; None in a simulated partition.
    agreed: RunData | None = None

    def rows_of(self, silo: SiloFacts, rows: I64 | None = None) -> SiloRows:
        """A silo's training rows, or others e.g. after a drift, by what the silo can use of them at the time."""
        present = self.prepared.present if self.dropped is None else self.dropped
        held = self.train[silo.index] if rows is None else rows
        return silo_rows(held, present, image=silo.image, text=silo.text)

    @cached_property
    def run_data(self) -> RunData:
        """What all processes of the run know about its data."""
        if self.agreed is not None:
            return self.agreed
        prepared = self.prepared
        return RunData(self.silos, prepared.inputs, prepared.label_names, self.cache, public=self.public_dataset)

    def counted(self, scenario: Scenario) -> RunData:
        """The same with the numbers of items and the digests, which only the coordinator needs."""
        prepared, counts = self.prepared, {silo.name: self.counts_of(silo) for silo in self.silos}
        labels = prepared.labels
        return replace(
            self.run_data,
            labelled=labels is None or bool(labels[np.concatenate(self.train)].any()),
            digest=prepared.digest,
            content=prepared.content,
            counts=counts,
            evaluated=(len(self.evaluated), int(prepared.captions[self.evaluated].sum())),
            heldout_without_pair=len(prepared.rows(scenario.evaluation.split)) - len(self.evaluated),
            encoders=encoders_of(prepared),
            label_divergence=self.label_divergence,
        )

    @cached_property
    def label_divergence(self) -> dict[str, float]:
        """Jensen-Shannon divergence [bits] of a silo's training labels from those of all silos, by name of the silo.

        Silos without labels are left out. If labels have two levels, those of the finer level count.
        """
        labels, columns = self.prepared.labels, fine_columns(self.prepared.label_names)
        if labels is None or len(self.silos) == 1:
            return {}
        counts = [np.asarray(labels[rows])[:, columns].sum(axis=0, dtype=np.int64) for rows in self.train]
        found = zip(self.silos, label_divergences(counts), strict=True)
        return {silo.name: value for silo, value in found if value is not None}

    def counts_of(self, silo: SiloFacts) -> Counts:
        """Numbers of a silo's items, by the modalities that they have."""
        parts = (self.train[silo.index], self.heldout[silo.index], self.galleries[silo.index])
        present = self.prepared.present if self.dropped is None else self.dropped
        return counts_of(self.prepared, self._union(*parts), present)

    def _union(self, *parts: I64) -> I64:
        """Rows that are in any part, ascending; they are marked, which is faster than sorting them."""
        held = np.zeros(self.prepared.n, np.bool_)
        for part in parts:
            held[part] = True
        return np.flatnonzero(held)

    def statement(self, silo: SiloFacts | None, items: ItemDigests, run: str) -> DataStatement:
        """What a silo, or with None the evaluator, states about its data; the digest is that of the whole data set."""
        return self._statement(silo, salted_digest(items, run))

    def statements(self, items: ItemDigests, run: str) -> dict[str, DataStatement]:
        """What each process of a simulated run has to state, by name; see :meth:`statement`."""
        digest = salted_digest(items, run)
        return {
            EVALUATOR: self._statement(None, digest),
            **{silo.name: self._statement(silo, digest) for silo in self.silos},
        }

    def _statement(self, silo: SiloFacts | None, digest: str) -> DataStatement:
        if silo is not None:
            counts = usable(self.counts_of(silo), image=silo.image, text=silo.text)
            return DataStatement(digest, mask_of(image=silo.image, text=silo.text), counts)
        counts = counts_of(self.prepared, self._union(self.evaluated, self.database), self.prepared.present)
        return DataStatement(digest, mask_of(image=True, text=True), counts)

    def facts(self, name: str) -> SiloFacts:
        """Facts of one silo."""
        return self.run_data.facts(name)

    def build_model(
        self, scenario: Scenario, device: str, modalities: tuple[Modality, ...], *, initial: bool = True
    ) -> TwoTower:
        """Build the two towers, as :meth:`RunData.build_model`."""
        return self.run_data.build_model(scenario, device, modalities, initial=initial)

    def context(self, scenario: Scenario, model: TwoTower) -> Context:
        """The context for both halves of a method."""
        return self.run_data.context(scenario, model)

    def load(self, rows: I64, *, image: bool, text: bool) -> SiloDataset:
        """Load rows int64 [n] into memory in their order, with the run's labels and vocabulary."""
        dataset = load_silo_dataset(self.prepared, rows, image=image, text=text)
        return dataset if self.agreed is None else as_agreed(dataset, self.prepared, self.agreed)

    def trained_items(self, scenario: Scenario, rows: I64, *, image: bool, text: bool) -> SiloDataset:
        """As :meth:`load`, with the labels that the scenario's objective trains on."""
        dataset, columns = self.load(rows, image=image, text=text), self.run_data.label_columns(scenario)
        if dataset.labels is None or len(columns) == dataset.labels.shape[1]:
            return dataset
        return replace(dataset, labels=dataset.labels[:, columns].contiguous())

    def public_dataset(self) -> SiloDataset | None:
        """The items of the split ``public``, which belong to no silo; None if there are none."""
        rows = self.prepared.pairs("public")
        return load_silo_dataset(self.prepared, rows, image=True, text=True) if len(rows) else None


def run_facts(scenario: Scenario) -> Mapping[str, object]:
    """The scenario as plain data, without keys of where it runs and where its files are."""
    return facts_of(scenario.model_dump(mode="json"))


def run_name(scenario: Scenario) -> str:
    """The run's name on the wire: equal only for equal scenarios, wherever they run and their files are."""
    return name_of(scenario.model_dump(mode="json"))


def device_of(name: str, index: int = 0) -> str:
    """Resolve ``auto`` and check a device; for a GPU, switch this process to deterministic kernels.

    Args:
        name: ``auto``, ``cpu`` or ``cuda:N``.
        index: index of the silo or process; ``auto`` assigns the machine's GPUs round-robin.

    Raises:
        InputError: the name is invalid, or the device does not exist.
    """
    if name == "cpu":
        return name
    count = torch.cuda.device_count()
    if name == "auto":
        if not count:
            return "cpu"
        number = index % count
    else:
        number = int(name.partition(":")[2] or 0) if re.fullmatch(DEVICE, name) else count
    if number >= count:
        here = "".join(f", cuda:{each}" for each in range(count)) or ", as PyTorch finds no GPU on this machine"
        raise InputError("device", name, f"auto, cpu{here}")
    # Here, because features are extracted on the device before a model is built.
    make_gpu_repeatable()
    return f"cuda:{number}"


def device_here(name: str) -> str:
    """A run's device, or the CPU if this machine, such as the coordinator's, does not have it."""
    try:
        return device_of(name)
    except InputError:
        return "cpu"


@span("data")
def build_population(
    scenario: Scenario,
    progress: Progress | None = None,
    cache: Path | None = None,
    *,
    folder: Path | None = None,
    pooled: bool = False,
    before: Callable[[ExtractionPlan], None] | None = None,
) -> Population:
    """Prepare and partition the data, or load both from the cache.

    Args:
        scenario: the resolved scenario.
        progress: called with (what, done, total) during long steps.
        cache: the cache folder; None takes the default.
        folder: folder of the prepared data, if known. It saves half a second of hashing and 20 MB of memory per
            process.
        pooled: assign the training data of all silos to the first one, in both modalities, as for central training.
            Held-out items stay with their silos.
        before: called before features are extracted, which can take hours; an error of it ends the preparation.

    Raises:
        InputError: the data cannot be read, or cannot be partitioned as required.
    """
    cache = cache or cache_folder()
    # Also if nothing is extracted: device_here makes all processes of a run on a GPU compute deterministically.
    device = device_here(scenario.device)
    prepared = (
        open_prepared(folder)
        if folder is not None
        else prepare(scenario.dataset, scenario.backbone, cache, scenario.seed, progress, device, before)
    )
    train, heldout, galleries, evaluated = _partition(scenario, prepared, cache, progress)
    dropped = None
    if scenario.missing_modality.per == "item" and not pooled:
        dropped = without_dropped(prepared.present, prepared.rows("train"), scenario.missing_modality, scenario.seed)
    silos = _facts(scenario, train, prepared.present if dropped is None else dropped)
    fold = scenario.evaluation.fold_size
    if fold is not None and fold > len(evaluated):
        raise InputError("evaluation.fold_size", fold, f"at most {len(evaluated)}, the items of the evaluated split")
    if pooled:
        nothing = np.zeros(0, np.int64)
        train = (np.sort(np.concatenate(train)), *(nothing for _ in silos[1:]))
        alone = silo_rows(train[0], prepared.present, image=True, text=True)
        first = SiloFacts(silos[0].name, 0, True, True, len(alone.image_only), len(alone.text_only))
        silos = (first, *silos[1:])
    database = _database(scenario, prepared)
    return Population(prepared, silos, train, heldout, evaluated, database, galleries, cache, dropped)


def _facts(scenario: Scenario, train: Parts, present: Present) -> tuple[SiloFacts, ...]:
    """Facts of the silos: the modalities that the scenario leaves them, as far as their items have them.

    Raises:
        InputError: a silo has no item with a modality that the scenario leaves it.
    """
    missing, names, silos = scenario.missing_modality, scenario.silo_names, list[SiloFacts]()
    whole = missing if missing.per == "silo" else MissingModality()
    everyone = scenario.all_silo_names
    has = dict(zip(everyone, partition.modalities(whole, everyone, scenario.seed), strict=True))
    for index, (name, (image, text)) in enumerate((name, has[name]) for name in names):
        held = modalities_held(train[index], present, image=image, text=text)
        if not any(held):
            only = "an image" if image else "captions"
            raise InputError("missing_modality", f"{name} without any item that has {only}", "silos with such an item")
        alone = silo_rows(train[index], present, image=True, text=True)
        silos.append(SiloFacts(name, index, *held, len(alone.image_only), len(alone.text_only)))
    return tuple(silos)


def own_population(scenario: Scenario, name: str, prepared: Prepared, agreed: RunData) -> Population:
    """The population as a silo, or an evaluator, with its own data sees it: only its own rows."""
    nothing, database = np.zeros(0, np.int64), _database(scenario, prepared)
    train, evaluated = prepared.rows("train"), prepared.pairs(scenario.evaluation.split)

    def of(rows: I64) -> Parts:
        return tuple(rows if silo.name == name else nothing for silo in agreed.silos)

    return Population(
        prepared, agreed.silos, of(train), of(evaluated), evaluated, database, of(database), agreed.cache, agreed=agreed
    )


def _database(scenario: Scenario, prepared: Prepared) -> I64:
    kept: npt.NDArray[np.bool_] = prepared.present[:, 0] & prepared.present[:, 1]  # faster than along the short axis
    for each in (scenario.evaluation.split, "public", *(["val"] if prepared.val_apart else [])):
        kept[prepared.rows(each)] = False
    return np.flatnonzero(kept)


def _partition(
    scenario: Scenario, prepared: Prepared, cache: Path, progress: Progress | None
) -> tuple[Parts, Parts, Parts, I64]:
    """The partition of the silos that take part, from the cache if it was computed before."""
    facts = {
        "format": _FORMAT,
        "data": prepared.digest,
        "partition": scenario.partition.model_dump(mode="json"),
        "silos": scenario.silos.count,
        "seed": scenario.seed,
        "split": scenario.evaluation.split,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    path = cache / "partitions" / f"{key}.npz"
    found = _read_npz(path)  # first without the lock, because a read-only cache may contain it
    if found is None:
        try:
            with locked(path.with_suffix(".lock")):
                found = _read_npz(path)
                if found is None:
                    found = computed = _compute_partition(scenario, prepared, cache, progress)
                    write_atomically(path, lambda temporary: _write_npz(temporary, computed))
        except OSError as error:
            raise RunError(f"cache {path.parent} cannot be written: {error.strerror or error}") from error
    parts, names = tuple(np.split(found["rows"], found["ends"][:-1])), scenario.all_silo_names
    # The partition is that of all silos, so that it is the same without some of them.
    here = [index for index, name in enumerate(names) if name not in scenario.silos.without]
    train, heldout, galleries = (tuple(parts[len(names) * split + index] for index in here) for split in range(3))
    return train, heldout, galleries, found["evaluated"]


def _read_npz(path: Path) -> dict[str, I64] | None:
    """Read a cached partition; None if there is none, or it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = {name: stored[name] for name in ("ends", "rows", "evaluated")}
            return found if str(stored["digest"]) == _digest(found) else None
    except Exception:  # NumPy raises many types on a damaged file
        return None


def _digest(arrays: Mapping[str, I64]) -> str:
    """BLAKE3 (hex) of a partition's arrays, kept with it in the cache; every process of a run computes it."""
    hashed = blake3()
    for name, array in sorted(arrays.items()):
        hashed.update(f"{name} {array.dtype} {array.shape}\n".encode())
        hashed.update(np.ascontiguousarray(array).view(np.uint8).data)
    return hashed.hexdigest()


def _write_npz(path: Path, arrays: dict[str, I64]) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, digest=np.array(_digest(arrays)), **arrays)


def _compute_partition(
    scenario: Scenario, prepared: Prepared, cache: Path, progress: Progress | None
) -> dict[str, I64]:
    train, evaluated = prepared.rows("train"), prepared.pairs(scenario.evaluation.split)
    if len(evaluated) == 0:
        pairs = ", with items that have both modalities" if prepared.unpaired else ""
        raise InputError("evaluation.split", scenario.evaluation.split, f"a split that the data set has{pairs}")
    others = np.setdiff1d(_database(scenario, prepared), train)
    if scenario.partition.kind == "column":
        shares, heldout, rest = _dealt_by_column(scenario, prepared, (train, evaluated, others))
    else:
        groups, evaluated_groups, other_groups = _groups(
            scenario, prepared, (train, evaluated, others), cache, progress
        )
        plan = partition.plan(scenario.partition, scenario.silos.count, groups, scenario.seed)
        shares = [train[part] for part in partition.deal(plan, groups)]
        heldout = [evaluated[part] for part in partition.deal(plan, evaluated_groups, scenario.evaluation.split)]
        rest = [others[part] for part in partition.deal(plan, other_groups, "gallery", sparse=True)]
    whole = np.all(prepared.present, axis=1)
    galleries = [np.sort(np.concatenate([share[whole[share]], more])) for share, more in zip(shares, rest, strict=True)]
    parts = [*shares, *heldout, *galleries]
    return {
        "rows": np.concatenate(parts).astype(np.int64),
        "ends": np.cumsum([len(part) for part in parts]).astype(np.int64),
        "evaluated": evaluated.astype(np.int64),
    }


def _dealt_by_column(scenario: Scenario, prepared: Prepared, rows: tuple[I64, I64, I64]) -> tuple[list[I64], ...]:
    """Each silo's training, evaluated and other rows, ascending, by the column that the partition names."""
    column, values = scenario.partition.column or "", prepared.column
    if values is None:
        allowed = "a column of a manifest, or a key of a features file"
        raise InputError("partition.column", f"{column} with data.name {label(scenario.dataset.name)}", allowed)
    silo, count = partition.by_column(values, column, scenario.silos.count), scenario.silos.count
    parts = tuple([part[silo[part] == index] for index in range(count)] for part in rows)
    for name in ("train", scenario.evaluation.split):
        found = set(silo[prepared.rows(name)].tolist())
        for index in range(count):
            if index not in found:
                value = values[int(np.flatnonzero(silo == index)[0])]
                raise InputError(f"partition.column {column}", f"no {name} item with {value}", "one for every value")
    return parts


def check_clusters(clusters: int, texts: int) -> None:
    """Refuse more text clusters than there are training items with texts."""
    if clusters > texts:
        raise InputError("partition.clusters", clusters, f"at most {texts}, the training samples with captions")


def _groups(
    scenario: Scenario, prepared: Prepared, rows: tuple[I64, I64, I64], cache: Path, progress: Progress | None
) -> tuple[I64, I64, I64]:
    """Group of each training, evaluated and other item, depending on the kind of partition."""
    train = rows[0]
    match scenario.partition.kind:
        case "iid":
            return (
                np.zeros(len(rows[0]), np.int64),
                np.zeros(len(rows[1]), np.int64),
                np.zeros(len(rows[2]), np.int64),
            )
        case "dir_clusters":
            clusters = scenario.partition.clusters
            check_clusters(clusters, int(np.asarray(prepared.present)[train, 1].sum()))
            features = text_features(
                prepared, scenario.backbone, scenario.seed, cache, progress, device_here(scenario.device)
            )
            with_text = np.asarray(prepared.present)[:, 1]
            centres = partition.cluster_centres(features[train[with_text[train]]], clusters, scenario.seed)
            # Items without captions are spread over the clusters, which are clusters of texts.
            spread = numpy_generator(scenario.seed, "partition", "without text").integers(clusters, size=prepared.n)
            one, two, three = (
                np.where(with_text[part], partition.nearest_centre(features[part], centres), spread[part])
                for part in rows
            )
            return one, two, three
        case _:
            labels = prepared.labels
            if labels is None:
                raise InputError(
                    "partition.kind", scenario.partition.kind, "iid or dir_clusters: the data set has no labels"
                )
            by = scenario.partition.label
            one, two, three = (partition.label_groups(labels[part], labels[train], by) for part in rows)
            return one, two, three
