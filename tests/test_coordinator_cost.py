"""The cost model: how much virtual time a task takes."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from coordinator.run_context import CostModel, slowdowns
from fedmq.config.sections import COST_PRESETS, Cost

SILOS = tuple(f"silo-{index:02d}" for index in range(30))
PLAIN = {"speed_sigma": 0.0, "jitter_sigma": 0.0, "latency": 0.0, "bandwidth": 1e12}


def model(**values: object) -> CostModel:
    return CostModel(Cost.model_validate({**PLAIN, **values}), 3, SILOS, 2, 1000, 500)


def test_compute_grows_with_samples_and_epochs() -> None:
    assert model(seconds_per_sample=0.1).duration("silo-00", 1, 50) == pytest.approx(0.1 * 50 * 2)


def test_download_and_upload_have_separate_bandwidths() -> None:
    cost = model(seconds_per_sample=0, latency=0.5, down_bandwidth=100, up_bandwidth=10)
    assert cost.duration("silo-00", 1, 50) == pytest.approx(2 * 0.5 + 1000 / 100 + 500 / 10)
    assert model(seconds_per_sample=0, bandwidth=100).duration("silo-00", 1, 50) == pytest.approx(15)


def test_a_class_slows_down_its_share_of_the_silos() -> None:
    cost = Cost.model_validate({"classes": {"slow": {"share": 0.1, "slowdown": 10}}})
    found = slowdowns(cost, 3, SILOS)
    assert sorted(found.values()) == [1.0] * 27 + [10.0] * 3
    assert found != slowdowns(cost, 4, SILOS)


def test_silos_named_in_a_class_belong_to_it_and_to_no_other() -> None:
    classes = {"old": {"silos": ["silo-03", "silo-05"], "slowdown": 7}, "new": {"share": 0.9, "slowdown": 0.5}}
    found = slowdowns(Cost.model_validate({"classes": classes}), 3, SILOS)
    assert (found["silo-03"], found["silo-05"]) == (7.0, 7.0)
    assert sorted(found.values()) == [0.5] * 27 + [1.0] + [7.0] * 2


def test_jitter_has_median_one_and_pareto_jitter_has_a_heavy_tail() -> None:
    for kind in ({"jitter_sigma": 0.5}, {"jitter": "pareto", "jitter_tail": 1.5}):
        drawn = [model(**kind).jitter("silo-00", sequence) for sequence in range(2000)]
        assert median(drawn) == pytest.approx(1.0, abs=0.1)
    assert max(drawn) > 20
    assert min(drawn) > 0.6  # no task is much faster than usual


def test_lost_messages_are_resent_and_cost_time() -> None:
    lossless = model(seconds_per_sample=0, latency=1.0, down_bandwidth=1000, up_bandwidth=500)
    lossy = replace(lossless, cost=lossless.cost.model_copy(update={"loss": 0.5}))
    usual = lossless.duration("silo-00", 1, 1)
    drawn = [lossy.duration("silo-00", sequence, 1) for sequence in range(2000)]
    assert min(drawn) == pytest.approx(usual)
    # On average one copy of each message is lost, which costs its second on the link and a round trip.
    assert sum(drawn) / 2000 == pytest.approx(usual + 2 * (1 + 2), rel=0.05)


def test_a_preset_sets_the_values_that_are_not_given() -> None:
    cost = Cost.model_validate({"preset": "edge", "latency": 9})
    assert cost.latency == 9
    assert cost.seconds_per_sample == COST_PRESETS["edge"]["seconds_per_sample"]
