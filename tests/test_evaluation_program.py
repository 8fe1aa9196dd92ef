"""Held-out sets that models are evaluated on: the whole split, and each silo's queries and gallery, also small."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.config.resolve import load
from fedmq.config.scenario import Scenario
from fedmq.config.sections import Evaluation
from fedmq.data.silo_dataset import CaptionRows, SiloDataset
from fedmq.errors import InputError
from fedmq.evaluation.gallery_ranking import Embedded, fold_recalls, rank
from fedmq.evaluation.heldout import HeldOut, embed
from fedmq.evaluation.metrics import BUILT_IN, Measured, measure
from fedmq.federation import population as populations
from fedmq.federation.population import Population, build_population, device_of
from fedmq.federation.protocol import Encoders
from fedmq.seeds import numpy_generator
from fedmq.wire.payloads import Metrics
from tests import in_process_run
from tests.threaded_run import resolved

CLASSES, BITS = 4, 8


def features(folder: Path) -> Path:
    """40 training, 4 validation and 24 test items of four classes, 8-d."""
    generator = np.random.default_rng(0)
    count = 68
    classes = np.arange(count) % CLASSES
    centres = generator.normal(size=(CLASSES, BITS))
    image, text = (centres[classes] + 0.3 * generator.normal(size=(count, BITS)) for _ in range(2))
    split = np.array(["train"] * 40 + ["val"] * 4 + ["test"] * 24)
    path = folder / "items.npz"
    labels = np.eye(CLASSES, dtype=np.uint8)[classes]
    np.savez(path, image=image.astype(np.float32), text=text.astype(np.float32), labels=labels, split=split)
    return path


def scenario(tmp_path: Path, *changes: str) -> Scenario:
    file = tmp_path / "s.yaml"
    file.write_text(
        f"""name: own
rounds: 1
protocol: {{name: fedavg}}
objective: {{base: dcmh, bits: {BITS}}}
data: {{name: features, path: {features(tmp_path)}}}
backbone: {{name: features}}
silos: {{count: 3}}
partition: {{kind: dir_class, alpha: 0.5}}
evaluation: {{every: 0, gallery: database, map_at: [5]}}
launcher: inline
"""
    )
    return load(file, list(changes))


@pytest.mark.parametrize("change", [(), ("partition={kind: dir_clusters, clusters: 3}",)])
def test_the_gallery_is_partitioned_among_silos_like_the_training_data(tmp_path: Path, change: Sequence[str]) -> None:
    population = build_population(scenario(tmp_path, *change), cache=tmp_path / "cache")
    together = np.concatenate(population.galleries)
    assert sorted(together.tolist()) == population.database.tolist() == list(range(44))
    for own, train in zip(population.galleries, population.train, strict=True):
        assert set(train) <= set(own)
        assert np.array_equal(own, np.sort(own))


def heldout_and_encoders(tmp_path: Path, *changes: str) -> tuple[HeldOut, Encoders, Population]:
    chosen = scenario(tmp_path, *changes)
    population = build_population(chosen, cache=tmp_path / "cache")
    project = torch.randn(BITS, BITS, generator=torch.Generator().manual_seed(0))
    return HeldOut.load(chosen, population), Encoders(lambda x: x @ project, lambda x: x @ project), population


@pytest.mark.parametrize(("binary", "gallery"), [(True, "database"), (False, "split")])
def test_a_silos_queries_retrieve_from_the_whole_gallery(tmp_path: Path, binary: bool, gallery: str) -> None:
    changes = (f"evaluation.gallery={gallery}", f"evaluation.within={str(gallery == 'database').lower()}")
    heldout, encoders, population = heldout_and_encoders(tmp_path, *changes)
    names = tuple(heldout.items)
    found = heldout.measured(encoders, binary=binary, names=names)
    numbers = np.array([len(rows) for rows in population.heldout])
    assert numbers.sum() == len(population.evaluated)
    # Every query retrieves from the same gallery, so the mean over the silos' queries is that over all queries.
    for name in ("i2t_r1", "t2i_r5", "mean_r10", "map", "map_at5", *(["map_i2i"] if gallery == "database" else [])):
        mean = sum(n * found.per_silo[silo][name] for n, silo in zip(numbers, names, strict=True)) / numbers.sum()
        assert mean == pytest.approx(found.values[name]), name
    assert set(found.per_silo["silo-01"]) == set(found.values)


def test_a_silos_queries_retrieve_from_its_own_gallery_where_the_scenario_says_so(tmp_path: Path) -> None:
    heldout, encoders, population = heldout_and_encoders(tmp_path, "evaluation.silo_gallery=own")
    found = heldout.measured(encoders, binary=True, names=("silo-01",))
    assert heldout.gallery is not None
    queries, gallery = (embed(encoders, share, binary=True) for share in (heldout.dataset, heldout.gallery))
    places = [population.database.tolist().index(row) for row in population.galleries[1]]
    mine = [population.evaluated.tolist().index(row) for row in population.heldout[1]]
    own, options = queries.subset(np.array(mine)), heldout.scenario.evaluation
    expected = measure(Measured(own, options, gallery.subset(np.array(places)), heldout.scenario.seed))
    assert dict(found.per_silo["silo-01"]) == expected
    assert found.values["map"] != expected["map"]
    assert measure(Measured(own, options, None, heldout.scenario.seed))["map"] != expected["map"]


def test_random_embeddings_have_chance_recall_however_few_items_a_silo_holds() -> None:
    generator = np.random.default_rng(0)
    image, text = (generator.normal(size=(400, 8)).astype(np.float32) for _ in range(2))
    whole = Measured(Embedded(image, text, np.arange(400)), Evaluation())
    found = [measure(whole.silo(np.array([item]))) for item in range(400)]
    assert np.mean([each["mean_r1"] for each in found]) < 0.01
    assert np.mean([each["mean_r10"] for each in found]) == pytest.approx(10 / 400, abs=0.01)
    assert np.median([each["i2t_medr"] for each in found]) == pytest.approx(200, abs=30)


def test_folds_are_separate_galleries_and_an_incomplete_fold_is_dropped(tmp_path: Path) -> None:
    heldout, encoders, _ = heldout_and_encoders(tmp_path, "evaluation.fold_size=10")
    found = heldout.measured(encoders, binary=True, names=()).values
    items = embed(encoders, heldout.dataset, binary=True)
    assert len(items.image) == 24
    options = heldout.scenario.evaluation
    folds = [measure(Measured(items.subset(np.arange(start, start + 10)), options)) for start in (0, 10)]
    for name in ("i2t_r1", "t2i_r5", "mean_r10"):
        assert found[f"fold_{name}"] == pytest.approx(np.mean([each[name] for each in folds]))
    assert found["fold_mean_r1"] > found["mean_r1"]


def test_a_fold_larger_than_the_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"evaluation\.fold_size: found 25, allowed: at most 24"):
        build_population(scenario(tmp_path, "evaluation.fold_size=25"), cache=tmp_path / "cache")


def test_a_summary_has_every_silos_metrics_and_their_means(tmp_path: Path) -> None:
    summary = in_process_run.run(scenario(tmp_path, "protocol.name=local"), tmp_path / "run").summary.plain()
    names = ["silo-00", "silo-01", "silo-02"]
    for means, each in (
        ("per_silo_mean", "per_silo"),
        ("personal_per_silo_mean", "personal_per_silo"),
        ("personal", "personal_whole_split"),
    ):
        assert list(summary[each]) == names
        mean = np.mean([summary[each][name]["map_at5_i2t"] for name in names])
        assert summary[means]["map_at5_i2t"] == pytest.approx(mean)
    assert summary["personal_whole_split"] != summary["personal_per_silo"]


def test_recalls_rank_by_cosine_whatever_the_length_of_embeddings() -> None:
    generator = np.random.default_rng(0)
    image = generator.normal(size=(40, 6)).astype(np.float32)
    owner = np.repeat(np.arange(40), 2)
    text = image[owner] + generator.normal(size=(80, 6)).astype(np.float32)
    text[3] = 0
    lengths = [np.linalg.norm(each, axis=1, keepdims=True) for each in (image, text)]
    unit = Embedded(image / lengths[0], text / np.where(lengths[1] > 0, lengths[1], 1), owner)
    measured = [measure(Measured(each, Evaluation())) for each in (unit, Embedded(image, text, owner))]
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)
    folds = [fold_recalls(each, 20) for each in (unit, Embedded(image, text, owner))]
    assert folds[0] == folds[1]


@pytest.mark.parametrize("bits", [12, 48])
def test_equally_distant_codes_are_tied_in_recalls(bits: int) -> None:
    generator = np.random.default_rng(bits)
    image, text = generator.normal(size=(2, 60, bits)).astype(np.float32)
    found = measure(Measured(Embedded(image, text, np.arange(60), binary=True), Evaluation()))
    shuffled = numpy_generator(0, "recalls")
    rows, captions = shuffled.permutation(60), shuffled.permutation(60)
    distance = ((image[rows] >= 0)[:, None] != (text[captions] >= 0)[None]).sum(2)
    order = np.argsort(distance, axis=1, kind="stable")
    ranks = (captions[order] == rows[:, None]).argmax(1)
    for k in (1, 5, 10):
        assert found[f"i2t_r{k}"] == np.mean(ranks < k)


def test_a_damaged_partition_in_the_cache_is_rebuilt(tmp_path: Path) -> None:
    first = build_population(scenario(tmp_path), cache=tmp_path / "cache")
    (kept,) = (tmp_path / "cache" / "partitions").glob("*.npz")
    whole = kept.read_bytes()
    with np.load(kept) as stored:
        arrays = dict(stored)
    made = io.BytesIO()
    np.savez(made, **{**arrays, "rows": arrays["rows"][::-1]})  # with right checksums
    for damaged in (b"PK\x03\x04", b"", whole[: len(whole) // 2], made.getvalue()):
        kept.write_bytes(damaged)
        again = build_population(scenario(tmp_path), cache=tmp_path / "cache")
        assert all(np.array_equal(*each) for each in zip(first.train, again.train, strict=True))
        assert kept.read_bytes() == whole


def test_a_scenario_sets_the_map_denominator_and_the_handling_of_queries_without_relevant_items() -> None:
    image, text = torch.eye(4).numpy(), torch.eye(4).numpy()
    labels = np.array([[1, 0], [1, 0], [1, 0], [0, 1]], np.uint8)
    gallery = Embedded(image, text, np.arange(4), labels)
    queries = Embedded(image[[0, 3]], text[[0, 3]], np.arange(2), np.array([[1, 0], [0, 0]], np.uint8))

    def found(**keys: Any) -> tuple[float, float]:
        (way,) = rank(queries, gallery, Evaluation(map_at=(2,), **keys), 0, ("i2t",)).values()
        return way.map, way.map_at[2]

    # The first query ranks itself first and at least one of the two others after it; the second has no relevant item.
    whole, retrieved = found()
    assert found(map_empty="skip") == (2 * whole, 2 * retrieved)
    total, lesser = (found(map_denominator=each)[1] for each in ("total", "min"))
    assert 3 * total == pytest.approx(2 * lesser)
    assert total < retrieved


def test_device_auto_assigns_gpus_round_robin_and_unknown_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populations.torch.cuda, "device_count", lambda: 2)
    told: list[str] = []
    monkeypatch.setattr(populations, "make_gpu_repeatable", lambda: told.append("GPU"))
    assert device_of("cpu") == "cpu" and not told
    assert [device_of("auto", index) for index in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert device_of("cuda:1", 0) == "cuda:1"
    assert told == ["GPU"] * 5
    with pytest.raises(InputError, match="cuda:2"):
        device_of("cuda:2")
    for name in ("cuda:x", "cuda:-1", "foo", "cuda:", "cpu:1"):
        with pytest.raises(InputError, match=f"device: found '{name}', allowed: auto, cpu, cuda:0, cuda:1"):
            device_of(name)
    monkeypatch.setattr(populations.torch.cuda, "device_count", lambda: 0)
    assert device_of("auto", 3) == device_of("cpu", 3) == "cpu"


# ---------------------------------------------------------------------------------------------------- small galleries
WIDTH = 6
UNCHANGED = Encoders(lambda x: x, lambda x: x)


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> Scenario:
    return load(tiny)


@st.composite
def splits(draw: st.DrawFn) -> tuple[SiloDataset, list[np.ndarray]]:
    """A split of unrelated random vectors with 1 to 3 captions per image, and its items by silo, often one each."""
    owners = draw(st.lists(st.integers(0, 5), min_size=2, max_size=40))
    captions = draw(st.lists(st.integers(1, 3), min_size=len(owners), max_size=len(owners)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    counts = torch.tensor(captions)
    text = CaptionRows(torch.randn(int(counts.sum()), WIDTH, generator=generator), counts.cumsum(0) - counts)
    image = torch.randn(len(owners), WIDTH, generator=generator)
    silos = [np.flatnonzero(np.array(owners) == silo) for silo in sorted(set(owners))]
    return SiloDataset(image, text, counts, None, torch.arange(len(owners))), silos


def evaluated(scenario: Scenario, split: SiloDataset, silos: list[np.ndarray]) -> tuple[Metrics, dict[str, np.ndarray]]:
    items = {f"silo-{number:02d}": rows for number, rows in enumerate(silos)}
    heldout = HeldOut(scenario, split, items, None, {}, BUILT_IN)
    return heldout.measured(UNCHANGED, binary=False, names=tuple(items)), items


def recalls_by_sorting(split: SiloDataset, rows: np.ndarray, k: int) -> tuple[float, float]:
    """Recall@k of some items as queries into all items, image to text and text to image, by the definition."""
    assert split.image is not None and split.text is not None
    image, text = (torch.nn.functional.normalize(each, dim=1).numpy() for each in (split.image, split.text.values))
    owner = np.repeat(np.arange(len(image)), split.captions.numpy())
    scores = image @ text.T
    i2t = [item in owner[np.argsort(-scores[item], kind="stable")[:k]] for item in rows]
    t2i = [
        owner[caption] in np.argsort(-scores[:, caption], kind="stable")[:k]
        for caption in np.flatnonzero(np.isin(owner, rows))
    ]
    return float(np.mean(i2t)), float(np.mean(t2i))


@given(splits())
@settings(max_examples=60, deadline=None)
def test_the_recall_of_a_silo_is_that_of_its_items_in_the_whole_gallery(
    loaded: Scenario, drawn: tuple[SiloDataset, list[np.ndarray]]
) -> None:
    split, silos = drawn
    found, items = evaluated(loaded, split, silos)
    for name, rows in items.items():
        for k in (1, 5):
            expected = recalls_by_sorting(split, rows, k)
            values = found.per_silo[name]
            assert (values[f"i2t_r{k}"], values[f"t2i_r{k}"]) == pytest.approx(expected), (name, k)
            assert values[f"mean_r{k}"] == pytest.approx(np.mean(expected))


@pytest.mark.parametrize(("silos", "refused"), [pytest.param(12, False, marks=pytest.mark.slow), (23, True)])
def test_an_own_gallery_of_a_single_item_is_refused(tiny: Path, tmp_path: Path, silos: int, *, refused: bool) -> None:
    settings = ("evaluation.silo_gallery=own", f"silos.count={silos}", "missing_modality.silos={}", "rounds=1")
    chosen = resolved(tiny, *settings, "partition={kind: iid}")
    if not refused:
        in_process_run.run(chosen, tmp_path)
        return
    with pytest.raises(InputError, match=r"evaluation.silo_gallery: found 'own with silo-\d\d, whose gallery has a"):
        in_process_run.run(chosen, tmp_path)
