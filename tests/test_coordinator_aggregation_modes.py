"""Synchronous, buffered and asynchronous aggregation: every method, and whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import protocols
from coordinator.participation import trace_of
from coordinator.round_events import Phase
from fedmq.config.scenario import ProtocolChoice
from fedmq.errors import InputError, RunError
from fedmq.launch.supervisor import simulate_inline
from fedmq.runs.results import read_metrics
from fedmq.storage.run_folder import RunFolder
from protocols.parts import aggregation
from tests.small_federation import equal_states, population
from tests.threaded_run import resolved, run_of
from tests.virtual_time_federation import federation

every_protocol = pytest.mark.parametrize("name", protocols.names())


# ------------------------------------------------------------------------------------------------------ every method
@pytest.mark.slow
@every_protocol
def test_a_buffer_as_large_as_the_cohort_is_bit_identical_to_synchronous_rounds(name: str) -> None:
    for participation in (1.0, 0.5):
        rounds = federation(population(name), 3, {"participation": participation}).run()
        buffered = federation(population(name), 3, {"participation": participation, "mode": "buffered", "buffer": 99})
        assert equal_states(buffered.run(), rounds)
        assert set(buffered.staleness) == {0}


@pytest.mark.slow
@every_protocol
def test_a_method_stays_finite_with_stale_replies_in_buffered_and_async_mode(name: str) -> None:
    for settings in ({"mode": "buffered", "buffer": 2}, {"mode": "async"}):
        run_ = federation(population(name), 12, settings, mixing=0.6)
        state = run_.run()
        assert torch.isfinite(state.theta).all()
        assert all(torch.isfinite(tensor).all() for tensor in state.tensors.values() if tensor.is_floating_point())
        if len(run_.plan.eligible) == 4:
            assert max(run_.staleness) >= 2


def test_a_straggler_delays_synchronous_rounds_but_not_a_buffer() -> None:
    rounds, buffered = (federation(population("fedavg"), 6, {"mode": mode}) for mode in ("sync", "buffered"))
    rounds.run()
    buffered.run()
    assert rounds.now == pytest.approx(6 * 9.0)
    assert buffered.now < 9.0
    assert buffered.merges == [2] * 6


def test_an_async_reply_moves_the_model_by_the_mixing_rate_times_its_update() -> None:
    full_step, part = (federation(population("fedavg"), 1, {"mode": "async"}, mixing=rate) for rate in (1.0, 0.25))
    start = full_step.population.state.theta
    assert torch.allclose(part.run().theta - start, 0.25 * (full_step.run().theta - start), atol=1e-7)


# ---------------------------------------------------------------------------------------------------------- functions


def test_the_decay_of_a_moving_average_per_full_round_does_not_depend_on_the_number_of_merges() -> None:
    assert aggregation.decay_at_merge(0.9, 15, 15) == 0.9
    assert aggregation.decay_at_merge(0.9, 5, 15) ** 3 == pytest.approx(0.9)
    assert aggregation.decay_at_merge(0.9, 1, None) == 0.9


# ------------------------------------------------------------------------------------------------------------ methods
@pytest.mark.parametrize(("name", "averages"), [("fedavg", ("ema",)), ("rcsr", ("ema", "fair_ema"))])
def test_a_merge_of_half_a_cohort_decays_averages_by_the_square_root_of_the_rate(
    name: str, averages: tuple[str, ...]
) -> None:
    part, root = (population(name, dict.fromkeys(averages, rate)) for rate in (0.81, 0.9))
    for each in (part, root):
        each.round()
    choice = ProtocolChoice(name=name, **dict.fromkeys(averages, 0.81))
    part.protocol = protocols.create(choice, replace(part.context, cohort=4))
    for each in (part, root):
        each.round(each.eligible[:2])
    for key, tensor in part.state.tensors.items():
        assert torch.allclose(tensor, root.state.tensors[key], atol=1e-6), key


@every_protocol
def test_rarity_changes_the_merge_of_every_method_that_weights_replies(name: str) -> None:
    run_ = population(name)
    replies = run_.replies()
    tilted = [replace(replies[0], participation_weight=4.0), *replies[1:]]
    plain, rare = (run_.protocol.merge(run_.state, each, 0).state for each in (replies, tilted))
    unweighted = {"local", "fedproto"}  # local merges nothing, fedproto only tables of class means
    assert equal_states(plain, rare) is (name in unweighted or len(replies) == 1)


@pytest.mark.parametrize(("max_age", "forgotten"), [(0, True), (1, False), (None, False)])
def test_rcsrs_router_over_the_table_forgets_silos_past_the_age_limit(max_age: int | None, forgotten: bool) -> None:
    table, reporters = (population("rcsr", {"warmup": 0, "router_over": over}) for over in ("table", "reporters"))
    table.protocol.context = replace(table.context, max_age=max_age)  # type: ignore[attr-defined]
    for each in (table, reporters):
        each.round()
        each.round(each.eligible[1:])
    assert torch.equal(table.state.theta, reporters.state.theta) is forgotten


# --------------------------------------------------------------------------------------------------------- whole runs
STRAGGLER = ("cost.speed_sigma=0", "cost.classes={slow: {silos: [silo-01], slowdown: 10}}")


def inline(tiny: Path, out: Path, *settings: str) -> dict[str, Any]:
    scenario = resolved(tiny, "launcher=inline", "evaluation.every=0", "protocol.warmup=2", *settings)
    outcome = simulate_inline(run_of(scenario), RunFolder(out), resume=False, status=lambda _: None).outcome
    return outcome.summary.plain()


def merges(out: Path) -> list[dict[str, Any]]:
    lines = [line for line in read_metrics(RunFolder(out)) if line.kind == "merge"]
    return [{key: value for key, value in line.plain().items() if key != "wall"} for line in lines]


def notes(out: Path) -> str:
    return RunFolder(out).messages("coordinator").read_text()


@pytest.mark.slow
def test_runs_with_one_silo_at_a_time_are_the_same_in_every_mode(tiny: Path, tmp_path: Path) -> None:
    one = ("participation=0.25", "aggregation.mixing=1", "aggregation.staleness.kind=constant")
    digests = {
        mode: inline(tiny, tmp_path / mode, *one, f"aggregation.mode={mode}")["model_digest"]
        for mode in ("sync", "buffered", "async")
    }
    assert len(set(digests.values())) == 1


@pytest.mark.slow
def test_staleness_is_recorded_and_bounded(tiny: Path, tmp_path: Path) -> None:
    settings = ("rounds=14", "aggregation.mode=async", "participation=1", *STRAGGLER)
    inline(tiny, tmp_path / "free", *settings)
    ages = [line["staleness"][0] for line in merges(tmp_path / "free")]
    assert max(ages) > 3
    inline(tiny, tmp_path / "bound", *settings, "aggregation.max_staleness=3")
    assert max(line["staleness"][0] for line in merges(tmp_path / "bound")) == 3
    assert '"reason":"stale"' in notes(tmp_path / "bound")


@pytest.mark.slow
def test_over_selection_does_not_wait_for_the_straggler(tiny: Path, tmp_path: Path) -> None:
    waiting = inline(tiny, tmp_path / "all", "participation=0.75", *STRAGGLER)
    first = inline(tiny, tmp_path / "first", "participation=0.75", "aggregation.over_select=1.34", *STRAGGLER)
    assert all(len(line["replies"]) == 3 for line in merges(tmp_path / "first")[:1])
    assert first["seconds"]["virtual"] < 0.5 * waiting["seconds"]["virtual"]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "interrupted"), [("sync", "wait"), ("buffered", "lost")])
def test_intermittently_available_silos_reply_only_while_they_are_on(
    tiny: Path, tmp_path: Path, mode: str, interrupted: str
) -> None:
    settings = (
        "rounds=8",
        f"aggregation.mode={mode}",
        f"participation={{kind: availability, diurnal: {{period: 3, share: 0.4}}, interrupted: {interrupted}}}",
    )
    first = inline(tiny, tmp_path, *settings)
    scenario = resolved(tiny, *settings)
    trace = trace_of(scenario.participation, scenario.seed, scenario.silo_names)
    if interrupted == "wait":  # no task fails in this mode, so each merge waits for its last reply
        assert all(any(trace.on(silo, line["now"]) for silo in line["replies"]) for line in merges(tmp_path))
    assert ("went_off" in notes(tmp_path)) == (interrupted == "lost")
    if mode != "sync":
        assert inline(tiny, tmp_path / "again", *settings)["model_digest"] == first["model_digest"]


def test_a_run_ends_with_an_error_when_the_trace_leaves_no_silo_on(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("silo,on,off\n" + "".join(f"silo-0{index},0,0.5\n" for index in range(4)))
    with pytest.raises(RunError, match=r"participation\.trace"):
        inline(tiny, tmp_path / "run", "rounds=50", f"participation={{kind: availability, trace: {path}}}")


def test_a_run_does_not_resume_with_another_trace(tiny: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "trace.csv", tmp_path / "run"
    path.write_text("silo,on,off\n" + "".join(f"silo-0{index},0,900\n" for index in range(4)))
    scenario = resolved(tiny, "launcher=inline", f"participation={{kind: availability, trace: {path}}}")
    first = simulate_inline(run_of(scenario), RunFolder(out), resume=False, status=lambda _: None).outcome
    assert first.phase is Phase.DONE
    RunFolder(out).summary.unlink()
    path.write_text(path.read_text().replace("900", "9"))
    with pytest.raises(InputError, match=r"participation\.trace: .*trace\.csv: found 'another trace than"):
        simulate_inline(run_of(scenario), RunFolder(out), resume=True, status=lambda _: None)


def test_power_of_choice_selects_by_loss_and_needs_a_method_that_reports_losses(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("participation={rate: 0.5, kind: power_of_choice, candidates: 4}", "rounds=8", "protocol=fedavg")
    scenario = [each for each in settings if not each.startswith("protocol")]
    inline(tiny, tmp_path / "choice", *scenario)
    selected = [set(line["replies"]) for line in merges(tmp_path / "choice")]
    # Silos without a known loss come first.
    assert selected[0] | selected[1] == {f"silo-0{index}" for index in range(4)}
    kind = protocols.load("rcsr")
    monkeypatch.setattr(kind, "uploads", lambda self, silo: frozenset())
    with pytest.raises(InputError, match="power_of_choice"):
        inline(tiny, tmp_path / "refused", *scenario)


@pytest.mark.parametrize("protocol", ["local", "fedproto"])
def test_clipping_is_refused_where_no_silo_sends_an_update(tiny: Path, tmp_path: Path, protocol: str) -> None:
    settings = ("launcher=inline", f"protocol={protocol}", "privacy.clip_norm=1.0")
    with pytest.raises(
        InputError, match=rf"privacy\.clip_norm: found 1\.0, allowed: null: silos of {protocol} send no"
    ):
        simulate_inline(run_of(resolved(tiny, *settings)), RunFolder(tmp_path), resume=False, status=lambda _: None)
