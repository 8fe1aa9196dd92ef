"""RCSR with its router at the silos: the merge of what they add up, the router's gradient, bounds, and what leaves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmq.audit.log_checks import audit_run
from fedmq.audit.policy import check_policy, read_policy
from fedmq.config.privacy import SecureAggregation
from fedmq.errors import InputError
from fedmq.federation.protocol import take
from fedmq.runs.results import read_metrics
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.messages import EVALUATOR, Kind, Message
from fedmq.wire.payloads import Delta, Loss, Payload, RouterSums
from fedmq.wire.secure_sum import singles_out
from protocols.parts import router, silo_router
from protocols.parts.losses import unit
from protocols.rcsr import Rcsr
from silos.program import ReadySilo
from silos.tasks import SiloArguments
from tests import threaded_run
from tests.secure_round import KINDS, SIZES
from tests.small_federation import DIM, population
from tests.threaded_run import resolved, run

AT_SILOS = {"router_at": "silos", "warmup": 1}
POLICY = Path("docs/policies/secure_sums_router.yaml")
RUN = (
    "protocol={name: rcsr, warmup: 1, router_at: silos}",
    "rounds=4",
    "participation=1.0",
    "evaluation.every=0",
    "privacy.secure_aggregation={max_weight: 1.0, min_contributors: 1.0}",
)


def router_of(protocol: object) -> silo_router.SiloRouter:
    assert isinstance(protocol, Rcsr) and protocol.silo_router
    return protocol.silo_router


def test_a_merge_is_what_numpy_finds_from_the_replies() -> None:
    """Independent of the method's code: sums of factor times value, divided by the sums of factors."""
    run = population("rcsr", AT_SILOS, kinds=KINDS, sizes=SIZES)
    for _ in range(3):
        run.round()
    before, replies, part = run.state, run.replies(), router_of(run.protocol)
    merged = run.protocol.merge(before, replies, run.version).state
    sums = [take(reply.payloads, RouterSums) for reply in replies]
    place = {name: index for index, name in enumerate(part.names)}

    def total(name: str) -> np.ndarray:
        return np.sum([each.rows[place[name]].astype(np.float64) for each in sums], axis=0)

    step = np.zeros(len(before.theta))
    for name, where in part.branches.items():
        for reply in replies:
            step[where] += take(reply.payloads, Delta).buffer[where].astype(np.float64) / total(f"branch.{name}")[0]
    assert np.allclose(merged.theta, before.theta.numpy() + step, rtol=0, atol=1e-6)
    for row, name in enumerate(("image", "text")):
        found = total(f"prototype.{name}")
        mean = 0.9 * before.tensors["prototypes"][row].numpy() + 0.1 * found[1 : 1 + DIM] / found[0]
        assert np.allclose(merged.tensors["prototypes"][row], mean / np.linalg.norm(mean), atol=1e-6)
    mixes = np.stack([total(name) for name in ("mix.image", "mix.text", "direction", "token")]) / total("token")[0]
    assert np.allclose(merged.tensors["router_mix"], mixes, atol=1e-6)
    assert 0 < mixes[0, 0] < 1 and mixes[3, 0] == pytest.approx(1)
    for group, kind in enumerate(("paired", "image", "text")):
        members = [each.rows[place[f"loss.{kind}"], 0] for each in sums if each.support[place[f"loss.{kind}"]]]
        old = float(before.tensors["fair_running"][group])
        assert merged.tensors["fair_running"][group] == pytest.approx(old * (0.9 + 0.1 * np.mean(members)), rel=1e-6)
    gradient = np.sum([each.values.astype(np.float64) for each in sums], axis=0) / total("token")[0]
    old = router.Adam(before.tensors["router"], *(before.tensors[f"router_{name}"] for name in ("first", "second")), 2)
    stepped = router.adam_step(old, torch.from_numpy(gradient).float(), 1e-3)
    assert merged.values == {"merges": 4, "router_steps": 3}
    moved = merged.tensors["router"] - stepped.values
    bias = router.views(moved.clone(), part.layout).pop("score.bias")
    assert float(bias) == pytest.approx(-mixes[3, 1 + 8], abs=1e-6)  # the mean score
    assert float(moved.abs().sum()) == pytest.approx(abs(float(bias)), abs=1e-3)
    # A silo's own loss, relative to its group, moves its own weight (eq 10).
    assert len({float(run.personal[silo.index]["fair_log_q"]) for silo in run.eligible}) == len(KINDS)


@pytest.mark.parametrize("options", [{}, {"masked_ac": True}, {"eq9_half": True, "beta1": 0.5, "beta4": 0.0}])
def test_the_silos_gradients_add_up_to_that_of_the_router_s_loss(options: Mapping[str, object]) -> None:
    """With the present sums in place of the last ones, it is the gradient of RCSR's own loss by the scores."""
    generator, chosen = torch.Generator().manual_seed(0), router.RcsrOptions(**options)  # type: ignore[arg-type]
    mask = torch.tensor([[True, True], [True, False], [False, True], [True, True]])
    target = unit(torch.randn(2, DIM, generator=generator))
    filled = torch.where(mask[..., None], unit(torch.randn(4, 2, DIM, generator=generator)), target)
    scores = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
    weights = router.weights(scores)
    (expected,) = torch.autograd.grad(router.loss(weights, filled, mask, target, chosen), scores)
    w = weights.detach().float()
    own = torch.zeros(4, 3, 1 + DIM)
    own[:, :2] = torch.cat([torch.ones(4, 2, 1), filled], 2) * mask[..., None]
    own[:, 2] = torch.cat([torch.ones(4, 1), unit(filled[:, 0] - filled[:, 1])], 1)
    if chosen.masked_ac:
        own[:, 2] *= mask.all(1, keepdim=True)
    mixes = (w[:, None, None] * own).sum(0)
    slopes = torch.tensor([silo_router.slope(mixes, each, target, chosen) for each in own])
    slopes += chosen.beta4 * (w.log() - (w * w.log()).sum())
    assert torch.allclose((w * slopes).double(), expected, atol=1e-6)


def test_no_router_makes_a_silo_count_more_than_the_ratio() -> None:
    """A coordinator that sends one silo a router of high scores, and others one of low scores."""
    factors = []
    for bias in (100.0, -100.0):
        run = population("rcsr", {**AT_SILOS, "router_ratio": 3.0, "fair_eta": 5.0, "fair_tau": 0.0})
        for _ in range(3):
            router.views(run.state.tensors["router"], router_of(run.protocol).layout)["score.bias"].fill_(bias)
            replies = run.replies()
            run.state, run.version = run.protocol.merge(run.state, replies, run.version).state, run.version + 1
        factors += [take(reply.payloads, RouterSums).rows[5, 0] for reply in replies]
    assert max(factors) <= 1.0 and max(factors) / min(factors) == pytest.approx(3.0)


@pytest.mark.parametrize("weights", [(1.0,) * 5, (0.5, 0.2, 0.2, 0.1), (1.0, 1.0)])
def test_the_worst_factors_count_where_silos_may_be_singled_out(weights: tuple[float, ...]) -> None:
    worst = [np.array(weights) * factors for factors in itertools.product((1.0, 4.0), repeat=len(weights))]
    largest = max(float(each.max() / each.sum()) for each in worst)
    fewest = min(float(each.sum() ** 2 / (each**2).sum()) for each in worst)
    for options, refused in (
        ({"max_weight": largest + 1e-6, "min_contributors": fewest - 1e-6}, False),
        ({"max_weight": largest - 1e-6, "min_contributors": 1.0}, True),
        ({"max_weight": 1.0, "min_contributors": fewest + 1e-6}, True),
    ):
        limits = SecureAggregation.model_validate(options)
        assert (singles_out(np.array(weights), limits, 4.0) is not None) is refused, options
    assert singles_out(np.array(weights), SecureAggregation(max_weight=max(weights) / sum(weights))) is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("router", "uniform"),
        ("anchor", "multi"),
        ("filler", "learned"),
        ("masked_ema", False),
        ("masked_pc", False),
        ("router_softplus", True),
        ("router_mask", "none"),
        ("router_over", "table"),
        ("fair_update", "code"),
        ("branch_renorm", False),
        ("personal", "router"),
    ],
)
def test_options_that_need_single_silos_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"protocol\.{option}.*with router_at silos"):
        population("rcsr", {**AT_SILOS, option: value})


def test_merges_of_few_replies_are_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    settings = (*RUN[:4], "aggregation.mode=buffered", "aggregation.buffer=2")
    with pytest.raises(InputError, match=r"protocol\.router_at: .*merges of fewer replies than a round.*mode sync"):
        run(resolved(tiny, *settings), tmp_path)


def test_a_run_that_is_resumed_gives_the_same_model_and_nothing_leaves_in_clear(tiny: Path, tmp_path: Path) -> None:
    for name in ("once", "twice"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scenario.yaml").write_text((scenario := resolved(tiny, *RUN)).dump())
    run(scenario, tmp_path / "once")
    log = RunFolder(tmp_path / "twice").messages("coordinator")

    def masking() -> bool:
        return log.exists() and '"masked_update"' in log.read_text() and '"base_version":2' in log.read_text()

    run(scenario, tmp_path / "twice", stop_wanted=masking)
    run(scenario, tmp_path / "twice", resume=True)
    once, twice = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("once", "twice"))
    assert once["model_digest"] == twice["model_digest"]
    merges = [line for line in read_metrics(RunFolder(tmp_path / "once")) if "router_loss" in line.model_dump()]
    assert len(merges) == 3
    audit = audit_run(tmp_path / "once")
    assert not audit.findings and not check_policy(audit, read_policy(POLICY), POLICY).findings
    replies = [record for _, record in audit.messages if record.header.kind is Kind.REPLY]
    sent = {kind for record in replies if record.header.sender != EVALUATOR for kind, _ in record.payloads}
    assert sent == {"update_report", "sealed_shares", "masked_update", "revealed_shares"}


def test_a_planted_loss_is_stopped_at_the_silo(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One silo's program is changed to send its loss beside its report; all silos have the policy."""
    respond = ReadySilo.respond

    def planted(ready: ReadySilo, message: Message) -> tuple[Payload, ...]:
        more = (Loss(0.5),) if ready.silo.facts.name == "silo-01" and message.header.kind is Kind.TASK else ()
        return (*respond(ready, message), *more)

    monkeypatch.setattr(ReadySilo, "respond", planted)
    monkeypatch.setattr(threaded_run, "SiloArguments", partial(SiloArguments, policy=POLICY.absolute()))
    (tmp_path / "scenario.yaml").write_text((scenario := resolved(tiny, *RUN, "rounds=1")).dump())
    run(scenario, tmp_path)
    log = RunFolder(tmp_path).messages("silo-01")
    assert '"withheld":"loss"' in log.read_text()
    kinds = {kind for _, record in read_log(log) if isinstance(record, MessageRecord) for kind, _ in record.payloads}
    assert "loss" not in kinds
    audit = audit_run(tmp_path)
    assert not audit.findings and not check_policy(audit, read_policy(POLICY), POLICY).findings
