"""``fedmq data check``: what lies on the disk, before any encoder is loaded, and every file that is not right."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedmq.config.scenario import Data, Scenario
from fedmq.data import catalogue, extract
from fedmq.data.label_levels import fine_columns
from fedmq.data.prepared import finish, save_arrays
from fedmq.data.raw_set import RawSet
from fedmq.data.splits import SPLITS, split_of
from fedmq.errors import InputError
from fedmq.federation.population import Population, build_population
from fedmq.progress import Progress, tell
from fedmq.storage.cache import cache_folder

BATCH = 256  # pictures read between two marks of progress
FEW_LABELS, FEW_SILOS = 30, 12  # at most, of which all numbers of items are printed; JSON has all
SHOWN = 20  # names printed of each kind; JSON has all
_WIDTH = 8  # of the vectors that stand for features of an encoder that has to be loaded to tell its own

#: Refuses a scenario that cannot run on the prepared data in a folder.
Fits = Callable[[Scenario, Path], None]


def unreadable(raw: RawSet, progress: Progress | None = None) -> Iterator[str]:
    """Decode every picture that is there; ``name: reason`` of each that cannot be read.

    Args:
        raw: the set.
        progress: told while reading.

    Raises:
        InputError: the package that reads these files is missing, which no file is to blame for.
    """

    def attempt(row: int) -> str | None:
        if raw.pictures.missing(row):
            return None
        try:
            raw.pictures.frames(row)
        except InputError as error:
            if isinstance(error.__context__, ImportError):
                raise
            return f"{error.place}: {error.found}"
        return None

    told = tell(progress, "images", len(raw))
    with ThreadPoolExecutor(extract.READERS) as pool:
        for start in range(0, len(raw), BATCH):
            rows = range(start, min(start + BATCH, len(raw)))
            yield from (found for found in pool.map(attempt, rows) if found is not None)
            told(rows.stop)


def check_raw(data: Data, progress: Progress | None = None) -> dict[str, Any]:
    """The facts about a set on disk, as plain values.

    Args:
        data: of the scenario.
        progress: told while pictures are read.

    Returns:
        ``data``, ``items``, ``captions``, ``splits``, ``labels`` (items of each), ``without_labels``, and by name
        ``missing``, ``unreadable`` and ``without_captions``; ``published`` are the numbers of items and labels that
        the set's papers use, where others lie here; ``problems`` are the lines a run would end with, and ``usable``
        says whether it would take the set.

    Raises:
        InputError: the annotations cannot be read.
    """
    entry = catalogue.find(data.name)
    raw = entry.read(data)
    kind = data.text or entry.text
    missing = [row for row in range(len(raw)) if raw.pictures.missing(row)]
    silent = [row for row, own in enumerate(raw.captions) if not own] if kind == "sentences" else []
    broken = list(unreadable(raw, progress))
    kept, split, problems = raw, None, []
    try:
        kept = extract.complete(raw, data, kind)
    except InputError as error:
        problems.append(str(error))
    try:
        split = split_of(kept.split, len(kept), data, entry.draw)
    except InputError as error:
        problems.append(str(error))
    return {
        "data": data.name,
        "items": len(kept),
        "captions": sum(map(len, kept.captions)) if kind == "sentences" else len(kept),
        "splits": {} if split is None else {name: int((split == code).sum()) for code, name in enumerate(SPLITS)},
        **_label_facts(kept.labels, kept.label_names, len(kept)),
        "missing": [raw.pictures.name(row) for row in missing],
        "unreadable": broken,
        "without_captions": [raw.keys[row] for row in silent],
        "published": _published(data, len(raw), len(raw.label_names)),
        "problems": problems,
        "usable": not (broken or problems),
    }


def _published(data: Data, items: int, labels: int) -> dict[str, int]:
    """The sizes that a set's papers use, if others lie here; empty otherwise.

    A part of a set is a set, too, and no loader can know that files of it were left out.
    """
    if data.name in catalogue.OTHERS or data.labelled:
        return {}
    entry = catalogue.find(data.name)
    fine = entry.items in (0, items) and (not labels or entry.labels in (0, labels))
    sizes = {"items": entry.items} | ({"labels": entry.labels} if labels and entry.labels else {})
    return {} if fine else sizes


def _label_facts(labels: npt.NDArray[np.uint8] | None, names: Sequence[str], n: int) -> dict[str, Any]:
    if labels is None:
        return {"labels": {}, "without_labels": n}
    counts = np.asarray(labels).sum(axis=0, dtype=np.int64).tolist()
    return {
        "labels": dict(zip(names, counts, strict=True)),
        "without_labels": int((~np.asarray(labels).any(axis=1)).sum()),
    }


def _held(population: Population, silo: int) -> dict[str, int]:
    """How many of a silo's training items have each label."""
    labels = population.prepared.labels
    own = None if labels is None else labels[population.train[silo]]
    return dict(_label_facts(own, population.prepared.label_names, 0)["labels"])


def _twins(population: Population, progress: Progress | None) -> list[str]:
    """Keys of the evaluated items that have both the vectors and the captions of an item that is trained on.

    Pictures kept as pixels are not looked at: tens of gigabytes for a large set.
    """
    prepared = population.prepared
    if prepared.image.ndim > 2:
        return []
    trained = np.unique(np.concatenate([*population.train, np.zeros(0, np.int64)]))
    told = tell(progress, "items compared", len(trained) + len(population.evaluated))

    def content(row: int) -> bytes:
        own = prepared.text[row][: int(prepared.captions[row])]
        return hashlib.blake2b(prepared.image[row].tobytes() + own.tobytes(), digest_size=16).digest()

    seen = set()
    for done, row in enumerate(trained, 1):
        seen.add(content(row))
        told(done)
    found = []
    for done, row in enumerate(population.evaluated, len(trained) + 1):
        if content(row) in seen:
            found.append(prepared.keys[row])
        told(done)
    return found


def _world_facts(population: Population, progress: Progress | None) -> dict[str, Any]:
    split = np.asarray(population.prepared.split)
    return {
        **_label_facts(population.prepared.labels, population.prepared.label_names, population.prepared.n),
        "items": int(population.prepared.n),
        "captions": int(np.asarray(population.prepared.captions).sum()),
        "splits": {name: int((split == code).sum()) for code, name in enumerate(SPLITS)},
        "silos": {
            silo.name: {
                "modalities": [name for name, owned in (("image", silo.image), ("text", silo.text)) if owned],
                "samples": len(population.train[silo.index]),
                "labels": _held(population, silo.index),
                "heldout": len(population.heldout[silo.index]),
            }
            for silo in population.silos
        },
        "twins_of_training_items": _twins(population, progress),
    }


def check(scenario: Scenario, fits: Fits, progress: Progress | None = None) -> dict[str, Any]:
    """The facts about a scenario's data, and who would hold what as far as that is known without encoding anything.

    Args:
        scenario: as resolved.
        fits: what a run of its programs asks of a scenario and its data.
        progress: told during anything long.

    Returns:
        As :func:`check_raw`, and where the features are there ``silos`` and ``twins_of_training_items``, the keys of
        evaluated items that equal one. Openmoji's features are made at once, those of a set on disk by ``fedmq data
        features``. What a run would refuse, as a method without the labels that it needs, is the last of ``problems``.

    Raises:
        InputError: the data cannot be read, or cannot be shared out as asked.
    """
    data, backbone = scenario.data, scenario.backbone
    if data.name in ("openmoji", "features") or backbone.name == "features":
        population = build_population(scenario, progress)
        facts = {"data": data.name, **_world_facts(population, progress), "problems": [], "usable": True}
        facts["published"] = _published(data, facts["items"], len(facts["labels"]))
        return _with_refusal(facts, scenario, fits, population.prepared.folder)
    facts = check_raw(data, progress)
    if not facts["usable"]:
        return facts
    made = extract.plan(data, backbone, cache_folder(), scenario.seed)
    folder = cache_folder() / "data" / made.digest
    if folder.is_dir():
        population = build_population(scenario, progress)
        return _with_refusal(facts | _world_facts(population, progress), scenario, fits, folder)
    if backbone.adapter_site == "blocks" or backbone.end_to_end:
        return facts  # networks for pixels, which no vectors can stand for
    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as name:
        _stand_in(made, backbone.dim or _WIDTH, Path(name))
        return _with_refusal(facts, _on_vectors(scenario), fits, Path(name))


def _with_refusal(facts: dict[str, Any], scenario: Scenario, fits: Fits, folder: Path) -> dict[str, Any]:
    """The facts with what a run would refuse among the problems."""
    try:
        fits(scenario, folder)
    except InputError as error:
        return {**facts, "problems": [*facts["problems"], str(error)], "usable": False}
    return facts


def _stand_in(made: extract.ExtractionPlan, usual: int, folder: Path) -> None:
    """A prepared set with the labels and the split of one whose features are not extracted yet, and zeros for those.

    They are as wide as the features will be, or, where that is not known, as the other side's, or ``usual``.
    """
    n = len(made.raw)
    image, text = made.image.width, made.text.width if made.text else 0
    if made.text is None and made.raw.bag is not None:
        text = made.raw.bag.shape[1]
    for name, shape in (("image", (n, image or text or usual)), ("text", (n, 1, text or image or usual))):
        # Zeros that a file system need not store: a bag of words of NUS-WIDE has 780 MB of them.
        np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape)
    save_arrays(folder, captions=np.ones(n, np.int64), labels=made.raw.labels, split=made.split)
    finish(folder, made.digest, {}, made.raw.keys, made.raw.label_names)


def _on_vectors(scenario: Scenario) -> Scenario:
    """The scenario with what needs no features: text clusters are of features, and so is the backbone."""
    update: dict[str, Any] = {
        "backbone": scenario.backbone.model_copy(update={"name": "features", "pretrained": None, "text_encoder": None})
    }
    if scenario.partition.kind == "dir_clusters":
        update["partition"] = scenario.partition.model_copy(update={"kind": "iid"})
    return scenario.model_copy(update=update)


def _printable(text: str) -> str:
    """Bytes of a file's name that are no UTF-8 as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _shared_by_all(facts: dict[str, Any]) -> list[str]:
    """Labels by which all items are alike."""
    counts: dict[str, int] = facts.get("labels") or {}
    names = list(counts)
    return [names[column] for column in fine_columns(names) if counts[names[column]] == facts["items"]]


def show(facts: dict[str, Any], out: Console) -> None:
    """Print the facts of :func:`check`."""
    splits = ", ".join(f"{count} {name}" for name, count in facts["splits"].items() if count)
    line = f"{facts['data']}: {facts['items']} items, {facts['captions']} captions" + (splits and f" ({splits})")
    labels = facts.get("labels")
    if labels:
        line += f", {len(labels)} labels, {facts['without_labels']} items without one"
    out.print(line, highlight=False, markup=False)
    for label in _shared_by_all(facts):
        line = f"every item has the label {_printable(label)}, so that each is relevant to all others"
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    for kind in ("missing", "unreadable", "without_captions", "twins_of_training_items"):
        found = facts.get(kind, [])
        if found:
            rest = f" (the first {SHOWN}; --json has all)" if len(found) > SHOWN else ""
            out.print(f"{len(found)} {kind.replace('_', ' ')}{rest}:", highlight=False)
            for name in found[:SHOWN]:
                out.print(f"  {_printable(name)}", highlight=False, markup=False, soft_wrap=True)
    if facts.get("published"):
        usual = " and ".join(f"{count:,} {what}" for what, count in facts["published"].items())
        line = f"as its papers use it the set has {usual}: a part of its files may be missing"
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    for problem in facts.get("problems", []):
        out.print(_printable(problem), highlight=False, markup=False, soft_wrap=True)
    if "silos" in facts:
        table = Table("silo", "modalities", "samples", "held out")
        for name, own in facts["silos"].items():
            table.add_row(name, " + ".join(own["modalities"]), str(own["samples"]), str(own["heldout"]))
        out.print(table)
        if labels and len(labels) <= FEW_LABELS and len(facts["silos"]) <= FEW_SILOS:
            silos = {name.removeprefix("silo-"): own["labels"] for name, own in facts["silos"].items()}
            table = Table("silo", *silos)
            for label in labels:
                table.add_row(escape(label), *(str(own[label]) for own in silos.values()))
            out.print("training items of each label", table, sep="\n")
    elif facts["usable"]:
        out.print(
            "fedmq data features FILE extracts the features; then this shows who would hold what", highlight=False
        )
