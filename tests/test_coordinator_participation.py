"""Client selection: sampling, availability traces, their scenario keys; what tasks and messages cost."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.participation import Sampling, Trace, cohort_size, diurnal, read_trace
from coordinator.run_context import CostModel, slowdowns
from fedmq.config import resolve as scenarios
from fedmq.config.sections import COST_PRESETS, Cost, Diurnal, Participation
from fedmq.errors import InputError

SILOS = ("silo-00", "silo-01", "silo-02", "silo-03")


def test_a_cohort_size_is_the_rate_rounded_down_and_at_least_one() -> None:
    assert [cohort_size(rate, 4) for rate in (1.0, 0.74, 0.5, 0.01)] == [4, 2, 2, 1]
    assert cohort_size(0.29, 100) == 29


def test_uniform_sampling_is_uniform_and_an_absent_silo_does_not_reshuffle_the_others() -> None:
    counts = Counter(silo for version in range(2000) for silo in Sampling().choose(1, version, SILOS, 2, {}))
    assert all(abs(counts[silo] - 1000) < 100 for silo in SILOS)
    for version in range(50):
        everyone = Sampling().choose(1, version, SILOS, 2, {})
        assert set(everyone) - {"silo-03"} <= set(Sampling().choose(1, version, SILOS[:-1], 2, {}))


def test_sampling_by_data_selects_silos_in_proportion_to_their_samples() -> None:
    by_data = Sampling({"silo-00": 10, "silo-01": 20, "silo-02": 30, "silo-03": 40})
    counts = Counter(by_data.choose(1, version, SILOS, 1, {})[0] for version in range(4000))
    assert [counts[silo] / 4000 for silo in SILOS] == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)


def test_power_of_choice_selects_the_highest_losses_among_its_candidates_only() -> None:
    losses = dict(zip(SILOS, (4.0, 3.0, 2.0, 1.0), strict=True))
    choice = Sampling(dict.fromkeys(SILOS, 1), candidates=2)
    taken = Counter(choice.choose(1, version, SILOS, 1, losses)[0] for version in range(1200))
    # Silo 0 wins whenever it is drawn, 3 of 6 pairs; silo 3 never does.
    assert [taken[silo] / 1200 for silo in SILOS] == pytest.approx([1 / 2, 1 / 3, 1 / 6, 0], abs=0.05)


# --------------------------------------------------------------------------------------------------------- traces
TRACE = Trace({"silo-00": ((0.0, 10.0), (20.0, 30.0)), "silo-01": ((5.0, 40.0),)})


def test_an_interval_includes_its_start_and_excludes_its_end() -> None:
    assert [TRACE.on("silo-00", at) for at in (0.0, 9.9, 10.0, 20.0, 30.0)] == [True, True, False, True, False]
    assert TRACE.on("silo-03", 1e9)  # not listed


def test_a_reply_due_while_its_silo_is_off_arrives_when_it_is_on_again() -> None:
    assert TRACE.outcome_at("silo-00", 5.0, 8.0, wait=True) == 8.0
    assert TRACE.outcome_at("silo-00", 5.0, 12.0, wait=True) == 20.0
    assert TRACE.outcome_at("silo-00", 5.0, 22.0, wait=True) == 22.0


def test_without_waiting_a_task_is_lost_at_the_moment_its_silo_goes_off() -> None:
    at = TRACE.outcome_at("silo-00", 5.0, 12.0, wait=False)
    assert at == 10.0
    assert not TRACE.on("silo-00", at)
    assert TRACE.outcome_at("silo-00", 5.0, 22.0, wait=False) == 10.0
    assert TRACE.on("silo-00", TRACE.outcome_at("silo-00", 5.0, 9.0, wait=False))
    assert TRACE.outcome_at("silo-00", 25.0, 35.0, wait=True) == 30.0  # never on again


@settings(max_examples=30, deadline=None)
@given(st.floats(0.5, 1e5), st.floats(0.05, 0.95), st.integers(0, 50), st.floats(0, 1e6))
def test_diurnal_silos_alternate_between_on_and_off_without_end(
    period: float, share: float, seed: int, begin: float
) -> None:
    trace = diurnal(Diurnal(period=period, share=share), seed, SILOS)
    at, times = begin, [begin]
    for _ in range(7):
        after = trace.next_change("silo-01", at)
        assert at < after < math.inf
        assert trace.on("silo-01", after) is not trace.on("silo-01", at)
        at = after
        times.append(at)
    assert times[3] - times[1] == pytest.approx(period, rel=1e-6)


def test_a_trace_is_read_and_can_repeat(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("silo,on,off\nsilo-00,0,10\nsilo-01,5,8\nsilo-00,20,30\n\n")
    assert read_trace(path, SILOS).intervals == {"silo-00": ((0.0, 10.0), (20.0, 30.0)), "silo-01": ((5.0, 8.0),)}
    repeated = read_trace(path, SILOS, 30.0)
    assert [repeated.on("silo-01", at) for at in (5.0, 8.0, 35.0, 38.0, 3005.0)] == [True, False, True, False, True]
    assert repeated.next_on("silo-01", 8.0) == 35.0
    assert repeated.next_change("silo-00", 20.0) == 40.0  # on at the end of one period and at the start of the next


#: Content of a trace's file, and the line that is refused.
INVALID_TRACES = (
    (b"", 1),
    (b"name,on,off\n", 1),
    (b"silo,on,off\nsilo-00,1\n", 2),
    (b"silo,on,off\nsilo-77,0,1\n", 2),
    (b"silo,on,off\nsilo-00,0,soon\n", 2),
    (b"silo,on,off\nsilo-00,2,1\n", 2),
    (b"silo,on,off\nsilo-00,nan,1\n", 2),
    (b"silo,on,off\nsilo-00,0,inf\n", 2),
    (b"silo,on,off\nsilo-00,0,101\n", 2),
    (b"silo,on,off\nsilo-00,0,5\nsilo-00,4,6\n", 3),
    (b'silo,on,off\nsilo-00,0,1\nsilo-00,2,"5" 5', 3),
    (b"silo,on,off\nsilo-00,0,1\nsilo-00,2,\xff", 3),
    (b'silo,on,off\nsilo-00,0,1\nsilo-00,2,"5', 3),
)


def test_an_invalid_trace_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with pytest.raises(InputError, match=r"trace\.csv"):
        read_trace(path, SILOS)
    for content, line in INVALID_TRACES:
        path.write_bytes(content)
        with pytest.raises(InputError) as refused:
            read_trace(path, SILOS, 100.0)
        assert refused.value.place == f"{path}: line {line}", content


# ------------------------------------------------------------------------------------------------------ scenarios
def test_a_bare_number_is_the_participation_rate_and_other_keys_can_be_set_in_addition(tiny: Path) -> None:
    assert scenarios.load(tiny).participation == Participation(rate=0.75)
    assert scenarios.load(tiny, ["participation=0.5"]).participation == Participation(rate=0.5)
    reached = scenarios.load(tiny, ["participation.kind=by_data"]).participation
    assert (reached.rate, reached.kind) == (0.75, "by_data")


# -------------------------------------------------------------------------------------------------------------- costs
MANY = tuple(f"silo-{index:02d}" for index in range(30))
PLAIN = {"speed_sigma": 0.0, "jitter_sigma": 0.0, "latency": 0.0, "bandwidth": 1e12}


def model(**values: object) -> CostModel:
    return CostModel(Cost.model_validate({**PLAIN, **values}), 3, MANY, 2, 1000, 500)


def test_compute_grows_with_samples_and_epochs() -> None:
    assert model(seconds_per_sample=0.1).duration("silo-00", 1, 50) == pytest.approx(0.1 * 50 * 2)


def test_download_and_upload_have_separate_bandwidths() -> None:
    cost = model(seconds_per_sample=0, latency=0.5, down_bandwidth=100, up_bandwidth=10)
    assert cost.duration("silo-00", 1, 50) == pytest.approx(2 * 0.5 + 1000 / 100 + 500 / 10)
    assert model(seconds_per_sample=0, bandwidth=100).duration("silo-00", 1, 50) == pytest.approx(15)


def test_a_class_slows_down_its_share_of_the_silos() -> None:
    cost = Cost.model_validate({"classes": {"slow": {"share": 0.1, "slowdown": 10}}})
    found = slowdowns(cost, 3, MANY)
    assert sorted(found.values()) == [1.0] * 27 + [10.0] * 3
    assert found != slowdowns(cost, 4, MANY)


def test_silos_named_in_a_class_belong_to_it_and_to_no_other() -> None:
    classes = {"old": {"silos": ["silo-03", "silo-05"], "slowdown": 7}, "new": {"share": 0.9, "slowdown": 0.5}}
    found = slowdowns(Cost.model_validate({"classes": classes}), 3, MANY)
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
