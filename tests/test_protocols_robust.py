"""Robust aggregation: known results, and bounded influence of a few Byzantine silos."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedmq.config.sections import Robust
from fedmq.errors import InputError
from fedmq.federation.protocol import SiloFacts, Update
from fedmq.wire.layout import Layout
from fedmq.wire.log_events import LogEvent
from fedmq.wire.payloads import Delta, Loss, PartialDelta
from protocols.parts.aggregation import branch_slices
from protocols.parts.robust import distances, krum_scores, multi_krum, robust_replies, trimmed_mean
from tests import in_process_run
from tests.in_process_run import notes
from tests.threaded_run import resolved

LAYOUT = Layout.of([("visual.a", (3, 4), "float32"), ("text.a", (5,), "float32")])
SIZE = LAYOUT.size
BRANCHES = branch_slices(LAYOUT)


def reply(index: int, update: np.ndarray, *, image: bool = True, text: bool = True) -> Update:
    payloads = (Delta(LAYOUT.digest, update.astype(np.float32), 10), Loss(0.5))
    return Update(SiloFacts(f"silo-{index:02d}", index, image, text), 1, 0, 0, 1.0, payloads)


def updates(replies: list[Update]) -> np.ndarray:
    return np.array([each.payloads[0].buffer for each in replies])  # type: ignore[union-attr]


def constant(*values: float) -> list[Update]:
    return [reply(index, np.full(SIZE, value)) for index, value in enumerate(values)]


@pytest.mark.parametrize("rule", ["norm_bound", "krum", "median", "trimmed_mean"])
def test_idle_silos_neither_outvote_training_ones_nor_are_changed(rule: str) -> None:
    """Over all silos the median norm would be 0 and stop training, and Krum would keep the idle silos, which agree."""
    replies = constant(0, 0, 0, 0, 8, 8, 8)
    changed = robust_replies(replies, Robust(rule=rule, byzantine=0.1), LAYOUT)  # type: ignore[arg-type]
    assert all(a is b for a, b in zip(changed[:4], replies[:4], strict=True))
    assert (updates(changed)[4:] == 8).all()


def test_the_median_norm_is_taken_over_silos_that_trained() -> None:
    changed = robust_replies(constant(0, 1, 0, 2, 0, 8), Robust(rule="norm_bound"), LAYOUT)
    np.testing.assert_allclose(updates(changed)[:, 0], [0, 1, 0, 2, 0, 2], rtol=1e-6)


def test_krum_finds_the_outlier_among_silos_that_trained_and_drops_no_idle_silo() -> None:
    rule = Robust(rule="krum", byzantine=0.25)
    kept = robust_replies(constant(0, 1.0, 0, 50, 1.1, 0, 0.9, 0), rule, LAYOUT)
    assert [each.silo.index for each in kept] == [0, 1, 2, 4, 5, 6, 7]


def test_the_trimmed_mean_drops_both_extremes() -> None:
    rows = np.array([[0.0], [1.0], [2.0], [3.0], [1000.0]])
    np.testing.assert_array_equal(trimmed_mean(rows, 0.2), [2])
    np.testing.assert_array_equal(trimmed_mean(rows, 0.19), [2])
    np.testing.assert_array_equal(trimmed_mean(rows[1:], 0.2), [2.5])
    np.testing.assert_array_equal(trimmed_mean(np.vstack([rows, rows]), 0.2), [2])


def test_krum_scores_sum_the_nearest_distances() -> None:
    """Five points on a line, f = 1: M - f - 2 = 2 nearest others each."""
    points = np.array([0.0, 1.0, 2.0, 3.0, 100.0])
    scores = krum_scores((points[:, None] - points) ** 2, 1)
    np.testing.assert_allclose(scores, [(1 + 4) / 2, 1, 1, (1 + 4) / 2, (97**2 + 98**2) / 2])
    assert multi_krum(scores, 1) == [1]
    assert multi_krum(scores, 4) == [0, 1, 2, 3]


def test_an_update_that_krum_can_compare_with_no_other_scores_infinity() -> None:
    scores = krum_scores(np.array([[0.0, 1.0, math.nan], [1.0, 0.0, math.nan], [math.nan, math.nan, 0.0]]), 0)
    assert scores.tolist() == [1.0, 1.0, math.inf]


def test_distances_use_only_branches_that_both_silos_trained() -> None:
    image, text = BRANCHES["image"], BRANCHES["text"]
    rows = [np.zeros(SIZE, np.float32) for _ in range(3)]
    rows[0][image], rows[0][text], rows[1][image], rows[2][text] = 1.0, 2.0, 3.0, 4.0
    active = {"image": np.array([True, True, False]), "text": np.array([True, False, True])}
    np.testing.assert_allclose(distances(rows, active, BRANCHES), [[0, 4, 4], [4, 0, math.nan], [4, math.nan, 0]])


def test_the_median_of_a_branch_is_taken_over_silos_that_trained_it() -> None:
    image, text = BRANCHES["image"], BRANCHES["text"]
    only_image = np.zeros(SIZE)
    only_image[image] = 9.0
    replies = [*constant(1, 2, 3), reply(3, only_image, text=False), reply(4, only_image, text=False)]
    changed = updates(robust_replies(replies, Robust(rule="median"), LAYOUT))
    np.testing.assert_array_equal(changed[:, image], np.full_like(changed[:, image], 3.0))
    np.testing.assert_array_equal(changed[:3, text], np.full_like(changed[:3, text], 2.0))
    assert not changed[3:, text].any()


def test_krum_drops_the_outlier_with_all_its_payloads() -> None:
    kept = robust_replies(constant(1.0, 1.1, 0.9, 1.05, 50), Robust(rule="krum", byzantine=0.2), LAYOUT)
    assert [each.silo.name for each in kept] == ["silo-00", "silo-01", "silo-02", "silo-03"]
    (one,) = robust_replies(constant(1.0, 1.1, 0.9, 1.05, 50), Robust(rule="krum", keep=1), LAYOUT)
    assert one.silo.index in (0, 3)


def test_updates_of_some_layers_are_treated_like_full_ones() -> None:
    replies = [
        replace(each, payloads=(PartialDelta(LAYOUT.digest, ("text.a",), np.full(5, value, np.float32), 10),))
        for value, each in zip((1.0, 2.0, 3.0, 99.0, 98.0), constant(1, 2, 3, 4, 5), strict=True)
    ]
    assert (updates(robust_replies(replies, Robust(rule="median"), LAYOUT)) == 3.0).all()


def test_the_order_of_arrival_does_not_matter() -> None:
    replies = constant(3, 1, 2, 50)
    for rule in ("norm_bound", "median", "trimmed_mean", "krum"):
        forward = robust_replies(replies, Robust(rule=rule), LAYOUT)  # type: ignore[arg-type]
        backward = robust_replies(replies[::-1], Robust(rule=rule), LAYOUT)  # type: ignore[arg-type]
        np.testing.assert_array_equal(updates(forward), updates(backward))


@pytest.mark.parametrize("rule", ["norm_bound", "median", "trimmed_mean", "krum"])
def test_the_model_is_left_as_it_is_when_fewer_than_three_silos_trained(rule: str) -> None:
    for values in ((3.0,), (1.0, -300.0), (0.0, 1.0, 0.0, -300.0)):
        left: list[str] = []
        changed = robust_replies(constant(*values), Robust(rule=rule), LAYOUT, left.append)  # type: ignore[arg-type]
        assert len(changed) == len(values)
        assert not updates(changed).any()
        assert sorted(left) == ["text.a", "visual.a"]


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_a_module_that_few_silos_trained_is_left_as_it_is_and_the_others_are_merged(rule: str) -> None:
    only_image = np.zeros(SIZE)
    only_image[BRANCHES["image"]] = 2.0
    left: list[str] = []
    replies = [*constant(1, -300), *(reply(index, only_image, text=False) for index in (2, 3))]
    changed = updates(robust_replies(replies, Robust(rule=rule), LAYOUT, left.append))  # type: ignore[arg-type]
    assert left == ["text.a"]
    assert not changed[:, BRANCHES["text"]].any()
    np.testing.assert_array_equal(changed[:, BRANCHES["image"]], 1.5)


@settings(max_examples=100, deadline=None)
@given(
    honest=arrays.arrays(np.float64, st.tuples(st.integers(1, 6), st.just(SIZE)), elements=st.floats(0.5, 2)),
    lie=st.floats(-1e6, 1e6).filter(lambda value: abs(value) > 1e-3),
    place=st.integers(0, 6),
    rule=st.sampled_from(["norm_bound", "median", "trimmed_mean", "krum"]),
    trim=st.floats(0.01, 0.32),
)
def test_one_byzantine_silo_cannot_move_the_mean_of_any_number_of_replies_further_than_an_honest_one(
    honest: np.ndarray, lie: float, place: int, rule: str, trim: float
) -> None:
    rows = np.insert(honest, min(place, len(honest)), np.full(SIZE, lie), axis=0)
    replies = [reply(index, row) for index, row in enumerate(rows)]
    chosen = Robust(rule=rule, trim=trim, byzantine=trim)  # type: ignore[arg-type]
    merged = updates(robust_replies(replies, chosen, LAYOUT)).mean(axis=0)
    assert np.linalg.norm(merged) <= np.linalg.norm(np.full(SIZE, 2.0)) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("rule", "more", "found"),
    [
        ("median", ("participation=0.5",), "merges of 2 replies"),
        ("trimmed_mean", ("aggregation.mode=async",), "merges of 1 reply"),
        ("krum", ("aggregation.mode=buffered", "aggregation.buffer=2"), "merges of 2 replies"),
        ("norm_bound", ("participation=0.5",), "merges of 2 replies"),
        (
            "median",
            ("missing_modality={silos: {silo-01: image, silo-02: image}}",),
            "2 silos that train text: silo-00, ",
        ),
    ],
)
def test_a_rule_that_never_has_three_replies_to_compare_is_refused(
    rule: str, more: tuple[str, ...], found: str, tiny: Path, tmp_path: Path
) -> None:
    scenario = resolved(tiny, "participation=1", "protocol=fedavg", *more, f"aggregation.robust.rule={rule}")
    with pytest.raises(InputError, match=f"aggregation.robust.rule: {rule}: found '{found}.*at least 3"):
        in_process_run.run(scenario, tmp_path)


@pytest.mark.parametrize("setting", ["{rule: trimmed_mean, trim: 0}", "{rule: krum, byzantine: 0}"])
def test_a_rule_that_trusts_every_reply_is_refused(tiny: Path, setting: str) -> None:
    with pytest.raises(InputError, match=r"is 0: \w+ would trust every reply"):
        resolved(tiny, f"aggregation.robust={setting}")


@pytest.mark.slow
def test_a_run_with_krum_reports_the_silos_it_dropped(tiny: Path, tmp_path: Path) -> None:
    faults = "faults=[{kind: scaled, factor: 1000, silos: [silo-01]}]"
    rule = "aggregation.robust={rule: krum, byzantine: 0.1}"
    paired = ("participation=1.0", "silos.count=8", "missing_modality.silos={}")
    in_process_run.run(resolved(tiny, faults, rule, *paired), tmp_path)
    assert {note["silo"] for note in notes(tmp_path, LogEvent.REPLY_LEFT_OUT)} == {"silo-01"}


@pytest.mark.slow
def test_byzantine_silos_do_less_harm_with_a_robust_rule(tiny: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    def model(name: str, *more: str) -> np.ndarray:
        everybody = ("participation=1.0", "protocol=fedavg", "silos.count=8", "missing_modality.silos={}")
        in_process_run.run(resolved(tiny, *everybody, *more), tmp_path / name)
        tensors = load_file(tmp_path / name / "model" / "model.safetensors")
        return np.concatenate([tensors[key].ravel() for key in sorted(tensors)])

    faults = "faults=[{kind: scaled, factor: -30, silos: [silo-01]}]"
    honest = model("honest")
    harm = np.linalg.norm(model("plain", faults) - honest)
    for rule in ("median", "trimmed_mean", "krum", "norm_bound"):
        robust = model(rule, faults, f"aggregation.robust.rule={rule}")
        assert np.linalg.norm(robust - honest) < harm / 3, rule
