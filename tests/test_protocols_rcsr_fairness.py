"""RCSR's minimax fairness (eq 10): how losses are normalised, and that one absurd loss has a bounded effect."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.wire.payloads import Loss
from protocols import rcsr
from protocols.parts import aggregation, fairness
from tests.replies import with_payload
from tests.small_federation import population


@pytest.mark.parametrize(("rule", "share"), [("code", 1 / (1 + math.exp(2 / 1.5))), ("entropic", 0.5)])
def test_the_log_reports_the_weight_of_silos_that_lack_a_modality(rule: str, share: float) -> None:
    options = {"router": False, "fair_update": rule, "fair_eta": 1.0, "fair_tau": 0.5}
    run = population("rcsr", options, kinds=((True, True), (False, True)), sizes=(8, 8))
    replies = [with_payload(reply, Loss(value=value)) for reply, value in zip(run.replies(), (3.0, 1.0), strict=True)]
    log = run.protocol.merge(run.state, replies, run.version).log
    assert log["weight_single"] == pytest.approx(share), "losses of different kinds are compared by one rule alone"


def reporting_often(tau: float) -> torch.Tensor:
    """q of 30 silos after 200 merges of equal losses: the first five silos reply to all, the others to a fifth."""
    log_q = torch.full((30,), 1 / 30, dtype=torch.float64).log()
    for merge in range(200):
        chosen = torch.tensor([*range(5), *range(5 + merge % 5, 30, 5)])
        rates = torch.full((len(chosen),), 0.1, dtype=torch.float64)
        log_q = fairness.updated_log_q(log_q, torch.zeros(len(chosen), dtype=torch.float64), chosen, rates, tau=tau)
    return log_q.exp()


def test_with_entropy_silos_that_report_more_often_gain_weight_as_the_option_text_says() -> None:
    q = reporting_often(0.1)
    assert float(q[:5].min() / q[5:].max()) == pytest.approx(20, rel=0.1)


def test_an_entropy_step_that_would_make_q_oscillate_is_refused() -> None:
    rcsr.RcsrOptions(fair_eta=5.0, fair_tau=0.2)
    rcsr.RcsrOptions(fair_eta=6.0, fair_tau=0.5, fair_update="paper")
    with pytest.raises(ValueError, match=r"fair_eta times fair_tau: 3\.0, at least 0 and at most 1"):
        rcsr.RcsrOptions(fair_eta=6.0, fair_tau=0.5)


def test_a_zero_loss_counts_as_average_and_does_not_change_the_running_mean() -> None:
    running, seen = torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64), torch.tensor([True, False, False])
    losses = torch.tensor([0.0, 0.0, 4.0], dtype=torch.float64)
    normalised, after, now_seen = fairness.normalised_losses(losses, torch.tensor([0, 1, 2]), running, seen)
    assert normalised.tolist() == [1.0, 1.0, 1.0]
    assert after.tolist() == [2.0, 0.0, 4.0]
    assert now_seen.tolist() == [True, False, True]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    losses=st.lists(st.floats(0, 1e6), min_size=1, max_size=6),
    rule=st.sampled_from(["entropic", "paper", "code"]),
    eta=st.floats(0, 10),
)
def test_fairness_weights_are_a_distribution_for_any_losses(losses: list[float], rule: Any, eta: float) -> None:
    count = len(losses)
    log_q = torch.full((8,), 1 / 8, dtype=torch.float64).log()
    values = torch.tensor(losses, dtype=torch.float64)
    for _ in range(3):
        rates = torch.full((count,), eta, dtype=torch.float64)
        log_q = fairness.updated_log_q(log_q, values, torch.arange(count), rates, tau=0.1, rule=rule)
    fused = fairness.fused_weights(torch.full((count,), 1 / count, dtype=torch.float64), log_q[:count])
    assert torch.isfinite(log_q).all()
    assert float(log_q.exp().sum()) == pytest.approx(1)
    assert float(fused.sum()) == pytest.approx(1)


def test_one_absurd_loss_neither_dominates_the_merge_nor_corrupts_the_running_mean() -> None:
    running, seen = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), torch.tensor([True, False, False])
    groups = torch.zeros(15, dtype=torch.int64)
    losses = torch.ones(15, dtype=torch.float64)
    losses[3] = 1e30
    normalised, after, _ = fairness.normalised_losses(losses, groups, running, seen)
    assert float(normalised.max()) <= fairness.LARGEST
    assert float(after[0]) < 2.0
    # The same at the first observation; and a corrupted mean recovers.
    first, blinded, _ = fairness.normalised_losses(losses, groups, torch.zeros(3).double(), torch.zeros(3).bool())
    assert float(blinded[0]) < 100 and float(first.max()) < 100
    _, again, _ = fairness.normalised_losses(
        torch.ones(15).double(), groups, torch.tensor([1e26, 0.0, 0.0]).double(), seen
    )
    assert float(again[0]) <= fairness.FARTHEST


# ------------------------------------------------------------------------- merges of few replies
GROUPS = torch.tensor([0] * 13 + [1] * 10 + [2] * 7)


@functools.cache
def shares(replies: int, *, lie: float | None = None, when: int = 0, merges: int = 150) -> list[float]:
    """Each group's total q after merges of a few random silos' losses, one of which may be false."""
    generator = torch.Generator().manual_seed(0)
    tensors, last = fairness.initial(30), torch.zeros(30, dtype=torch.float64)
    for merge in range(merges):
        rows = torch.randperm(30, generator=generator)[:replies].sort().values
        losses = (0.5 * torch.randn(replies, generator=generator, dtype=torch.float64)).exp()
        if lie is not None and merge == when:
            losses[0] = lie
        last[rows] = losses
        tensors, _ = fairness.stepped(
            tensors,
            losses,
            rows,
            GROUPS[rows],
            torch.full((replies,), 0.1, dtype=torch.float64),
            kept=aggregation.decay_at_merge(0.9, replies, 15),
            tau=0.1,
            rule="entropic",
            center=True,
            known=(last.clone(), GROUPS),
        )
    q = tensors["fair_log_q"].exp()
    return [float(q[group == GROUPS].sum()) for group in range(3)]


@pytest.mark.parametrize("replies", [1, 2, 15])
@pytest.mark.parametrize(("loss", "when"), [(1e-30, 30), (1e-5, 30), (1.18e-11, 0)], ids=["0", "small", "at first"])
def test_one_very_small_loss_does_not_make_a_group_dominate(replies: int, loss: float, when: int) -> None:
    """Honest losses can be 1.18e-11: a paired silo of one item has InfoNCE 0 plus the proximal term of two epochs."""
    disturbed, honest = shares(replies, lie=loss, when=when), shares(replies)
    assert disturbed == pytest.approx(honest, abs=0.08)


def test_a_lone_reply_is_normalised_by_all_silos_last_losses() -> None:
    run = population("rcsr", kinds=((True, True),) * 4)
    run.round()
    blinded = {**run.state.tensors, "fair_running": torch.tensor([1e26, 0.0, 0.0], dtype=torch.float64)}
    run.state = dataclasses.replace(run.state, tensors=blinded)
    run.round(run.eligible[:1])
    assert float(run.state.tensors["fair_running"][0]) < 1e5


def test_the_papers_formula_has_no_caps() -> None:
    losses, start = [1.0, 1e-9, 500.0], torch.full((3,), 1 / 3, dtype=torch.float64).log()
    for rule in ("paper", "entropic"):
        options = {"fair_update": rule, "fair_center": False, "fair_tau": 0.0}
        run = population("rcsr", options, kinds=((True, True),) * 3)
        seen = {"fair_running": torch.tensor([2.0, 0, 0]).double(), "fair_seen": torch.tensor([True, False, False])}
        run.state = dataclasses.replace(run.state, tensors={**run.state.tensors, **seen})
        replies = [with_payload(reply, Loss(value)) for reply, value in zip(run.replies(), losses, strict=True)]
        after = run.protocol.merge(run.state, replies, 0).state.tensors["fair_log_q"]
        mean = 0.9 * 2.0 + 0.1 * sum(losses) / 3
        printed = start + 0.1 * torch.tensor(losses, dtype=torch.float64) / mean
        printed = printed - printed.logsumexp(0)
        assert torch.allclose(after, printed) is (rule == "paper")


def test_a_stale_loss_moves_q_less() -> None:
    run = population("rcsr", {"fair_eta": 0.4, "fair_tau": 0.5}, kinds=((True, True),) * 2, sizes=(8, 8))
    fresh, stale = (with_payload(reply, Loss(value)) for reply, value in zip(run.replies(), (1.0, 3.0), strict=True))
    stale = dataclasses.replace(stale, staleness=3, damping=0.5)
    after = run.protocol.merge(run.state, [fresh, stale], 0).state.tensors["fair_log_q"]
    # Normalised losses are 1/2 and 3/2; log q is (1 - eta tau h) log q + eta h (loss - 1), h = 1 and 1/2.
    expected = torch.tensor([0.8 * math.log(0.5) - 0.4 / 2, 0.9 * math.log(0.5) + 0.2 / 2], dtype=torch.float64)
    torch.testing.assert_close(after, expected - expected.logsumexp(0))


def test_a_silo_that_lost_a_modality_counts_in_its_new_group_even_when_it_does_not_report() -> None:
    run = population("rcsr", {"warmup": 0}, kinds=((True, True),) * 5, sizes=(9,) * 5)
    for version in range(6):
        replies = []
        for silo in run.context.silos if version < 2 else run.context.silos[:2]:
            lost = version == 1 and silo.index >= 2
            reply = with_payload(run.reply(silo, run.train(silo)), Loss(1e-4 if lost else 3.0))
            replies.append(dataclasses.replace(reply, silo=dataclasses.replace(silo, text=not lost)))
        run.state = run.protocol.merge(run.state, replies, run.version).state
        run.version += 1
    # The two silos that keep reporting have the same loss as a paired silo: they are average.
    assert float(run.state.tensors["fair_running"][0]) == pytest.approx(3.0)
    assert float(run.state.tensors["fair_log_q"][0].exp()) == pytest.approx(0.2, abs=0.02)
