"""Behaviour specific to RCSR and its personal variant: coordinator and silos."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmq.config.scenario import Training
from fedmq.federation.protocol import MergeResult, SiloFacts, State, Update, take
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.payloads import ClassPrototypes, Delta, Geometry, Loss, ModalityPrototypes, RouterStatistics
from protocols import rcsr
from protocols.parts import aggregation, personal_adapter, router
from protocols.parts.centroids import MEMBERS
from protocols.parts.losses import anchor, nearest_anchor, unit
from tests import in_process_run, threaded_run
from tests.replies import weights_of, with_payload
from tests.small_federation import DIM, equal_states, population, share
from tests.threaded_run import resolved


def test_the_router_over_the_table_equals_the_router_over_reporters_when_all_report() -> None:
    runs = [population("rcsr", {"warmup": 0, "router_over": over}) for over in ("reporters", "table")]
    for _ in range(3):
        for run in runs:
            run.round()
    assert equal_states(runs[0].state, runs[1].state)


def test_the_router_covers_all_silos_where_merges_are_of_few_replies_unless_configured() -> None:
    for given, whole, over in (
        (None, True, "reporters"),
        (None, False, "table"),
        ("reporters", False, "reporters"),
        ("table", True, "table"),
    ):
        run = population("rcsr", {"warmup": 0, "router_over": given, "minimax": False, "personal": "router"})
        context = dataclasses.replace(run.context, whole_rounds=whole)
        run.protocol = rcsr.Rcsr(run.protocol.options, context)  # type: ignore[attr-defined]
        run.round()
        run.round(run.eligible[:1])
        told = take(run.protocol.task(run.state, run.eligible[0]), RouterStatistics).weight
        assert told is not None
        # A softmax over one reply gives it the full weight.
        assert (told == 1.0) is (over == "reporters"), (given, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "over"),
    [
        ((), "reporters"),
        (("aggregation.mode=buffered",), "table"),
        (("aggregation.mode=buffered", "aggregation.buffer=3"), "reporters"),  # a round, to the bit
        (("aggregation.mode=async", "participation=0.25"), "reporters"),  # a round of a single reply
    ],
    ids=str,
)
def test_in_a_run_without_rounds_the_router_uses_the_table(
    settings: tuple[str, ...], over: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    merge = rcsr.Rcsr.merge

    def watched(protocol: rcsr.Rcsr, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        seen.append(protocol.router_over)
        return merge(protocol, state, replies, round_)

    monkeypatch.setattr(rcsr.Rcsr, "merge", watched)
    in_process_run.run(resolved(tiny, "rounds=4", "participation=0.75", *settings), tmp_path)
    assert seen == [over] * 4


def test_the_table_stores_the_modalities_of_each_silos_last_report() -> None:
    runs = [population("rcsr", {"warmup": 0, "router_over": over}) for over in ("reporters", "table")]
    for run in runs:
        run.round()
        lost, gained = run.context.silos[0], run.context.silos[1]
        lost, gained = dataclasses.replace(lost, text=False), dataclasses.replace(gained, text=True)
        run.shares = {**run.shares, 0: share(lost, 11), 1: share(gained, 9)}
        for _ in range(2):
            run.round([lost, gained, *run.context.silos[2:]])
    assert torch.equal(runs[0].state.theta, runs[1].state.theta)
    assert torch.equal(runs[0].state.tensors["router"], runs[1].state.tensors["router"])
    told = [[True, False], [True, True], [False, True], [True, True]]
    assert runs[1].state.tensors["table_mask"].tolist() == told
    runs[1].round(runs[1].context.silos[2:])
    assert runs[1].state.tensors["table_mask"].tolist() == told


# ------------------------------------------------------------------------- weights
@pytest.mark.parametrize("warmup", [0, 20])
@pytest.mark.parametrize("loss", [0.0, 1e30])
def test_weights_sum_to_one_and_stay_finite_for_extreme_losses(loss: float, warmup: int) -> None:
    run = population("rcsr", {"warmup": warmup, "branch_renorm": False}, kinds=((True, True),) * 4)
    run.round()
    replies = run.replies()
    replies[0] = with_payload(replies[0], Loss(value=loss))
    replies[1] = with_payload(replies[1], Geometry(values=np.full(4, 1e30, np.float32)))
    weights = weights_of(run, replies)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1, abs=1e-5)
    for _ in range(3):
        run.state = run.protocol.merge(run.state, replies, run.version).state
        run.version += 1
    for name, tensor in run.state.tensors.items():
        assert torch.isfinite(tensor).all(), name


def test_during_warm_up_weights_are_by_samples_and_the_router_is_not_trained() -> None:
    run = population("rcsr", {"warmup": 2, "minimax": False, "branch_renorm": False}, kinds=((True, True),) * 4)
    by_samples = torch.tensor([11, 9, 7, 5], dtype=torch.float64) / 32
    router = run.state.tensors["router"]
    for _ in range(2):
        np.testing.assert_allclose(weights_of(run, run.replies()), by_samples, atol=1e-6)
        run.round()
    assert run.state.values == {"merges": 2, "router_steps": 0}
    assert torch.equal(run.state.tensors["router"], router)
    routed = weights_of(run, run.replies())
    run.round()
    assert run.state.values["router_steps"] == 1
    assert not torch.equal(run.state.tensors["router"], router)
    assert not np.allclose(routed, by_samples, atol=1e-4)
    assert float(routed.sum()) == pytest.approx(1, abs=1e-5)


# ------------------------------------------------------------------------- prototypes


def test_a_modality_that_no_silo_reports_keeps_its_prototype() -> None:
    run = population("rcsr")
    image_silo = run.eligible[1]
    run.round([image_silo])
    assert run.state.tensors["prototypes_valid"].tolist() == [True, False]
    run.round()
    before = run.state.tensors["prototypes"]
    run.round([image_silo])
    after = run.state.tensors["prototypes"]
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


def test_a_prototype_of_a_modality_that_the_silo_lacks_is_ignored() -> None:
    run = population("rcsr", {"warmup": 0})
    run.round()
    replies = run.replies()
    image_only = replies[1]
    sent = next(payload for payload in image_only.payloads if isinstance(payload, ModalityPrototypes))
    for mask in (1, 3):
        lie = dataclasses.replace(sent, text=np.full(DIM, 7, np.float32), mask=mask)
        changed = [with_payload(reply, lie) if reply is image_only else reply for reply in replies]
        honest = run.protocol.merge(run.state, replies, 1)
        assert equal_states(run.protocol.merge(run.state, changed, 1).state, honest.state)


def test_an_image_only_silo_is_idle_until_there_is_a_text_prototype_then_moves_towards_it() -> None:
    run = population("rcsr", training=Training(batch_size=8, local_epochs=20))
    silo = run.eligible[1]
    assert run.train(silo).loss == 0.0
    run.round()
    target = run.state.tensors["prototypes"][1]

    def distance() -> float:
        with torch.no_grad():
            return float(1 - (run.model.image(run.shares[silo.index].image) @ target).mean())

    run.model.load(run.state.theta)
    before = distance()
    trained = run.train(silo)
    assert trained.loss > 0
    assert distance() < before


def test_multiple_anchors_pull_each_sample_to_the_nearest_and_a_single_one_is_the_papers_anchor() -> None:
    z, many = unit(torch.randn(5, DIM)), unit(torch.randn(3, DIM))
    cosines = z @ many.T
    assert torch.allclose(nearest_anchor(z, many), 1 - torch.stack([row.max() for row in cosines]).mean())
    assert torch.allclose(nearest_anchor(z, many[:1]), anchor(z, many[0]))


def test_silos_that_lack_a_modality_receive_all_its_centroids_after_the_warm_up() -> None:
    options = {"anchor": "multi", "anchor_centroids": 3, "anchor_support": 2, "warmup": 2}
    run = population("rcsr", options, kinds=((True, True), (True, False), (False, True)), sizes=(8, 8, 8))

    def down() -> list[ClassPrototypes | None]:
        tasks = [run.protocol.task(run.state, silo) for silo in run.eligible]
        return [next((each for each in task if isinstance(each, ClassPrototypes)), None) for task in tasks]

    for _ in range(2):
        assert down() == [None, None, None]
        run.round()
    run.round()
    paired, image_only, text_only = down()
    assert paired is None
    assert image_only is not None
    assert text_only is not None
    assert (image_only.modality, text_only.modality) == ("text", "image")
    assert min(image_only.counts) >= 2
    assert len(image_only.counts) > 3  # of the paired silo and of the text-only one
    assert MEMBERS + "_text" not in run.personal[1]
    assert MEMBERS + "_image" in run.personal[1]


# ------------------------------------------------------------------------- the report


def test_the_norm_ratio_of_a_single_modality_silo_stays_small_in_the_token() -> None:
    numbers = torch.tensor([[1.0, 1e8, 0.0, 1.0]])
    prototypes, mask = torch.ones(1, 2, DIM), torch.tensor([[True, False]])
    token = router.tokens(prototypes, mask, numbers, torch.zeros(1), hide_filled=True)
    assert token.shape == (1, 2 * DIM + 8)
    assert float(token.abs().max()) <= math.log1p(10) + 1e-6
    assert not token[0, DIM : 2 * DIM].any()


def test_prototypes_use_at_most_128_samples() -> None:
    run = population("rcsr", kinds=((True, True),), sizes=(300,))
    seen: list[int] = []

    def note(_: torch.nn.Module, arguments: tuple[torch.Tensor]) -> None:
        seen.append(len(arguments[0]))

    run.model.visual.register_forward_pre_hook(note)
    run.train(run.eligible[0])
    assert seen[-1] == 128
    assert sum(seen[:-1]) == 2 * 300  # two epochs, no batch dropped


# ------------------------------------------------------------------------- the router


def test_the_routers_network_equals_torchs_encoder_layer() -> None:
    shape = router.layout(DIM, learned_filler=False)
    p = router.views(router.initial(shape, torch.Generator().manual_seed(0)), shape)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, 0.1, "gelu", batch_first=True).eval()
    names = {
        "self_attn.in_proj_weight": "qkv.weight",
        "self_attn.in_proj_bias": "qkv.bias",
        "self_attn.out_proj.weight": "out.weight",
        "self_attn.out_proj.bias": "out.bias",
        "linear1.weight": "up.weight",
        "linear1.bias": "up.bias",
        "linear2.weight": "down.weight",
        "linear2.bias": "down.bias",
        "norm1.weight": "norm1.gain",
        "norm1.bias": "norm1.bias",
        "norm2.weight": "norm2.gain",
        "norm2.bias": "norm2.bias",
    }
    tokens = torch.randn(5, 2 * DIM + 8, generator=torch.Generator().manual_seed(1))
    x = torch.nn.functional.linear(tokens, p["input.0.weight"], p["input.0.bias"])
    x = torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (128,), p["input.norm.gain"], p["input.norm.bias"]))
    x = torch.nn.functional.linear(x, p["input.1.weight"], p["input.1.bias"])
    with torch.no_grad():
        for block in range(2):
            layer.load_state_dict({name: p[f"block.{block}.{own}"] for name, own in names.items()})
            x = layer(x[None])[0]
    expected = torch.nn.functional.linear(x, p["score.weight"], p["score.bias"]).squeeze(-1)
    assert torch.allclose(router.logits(p, tokens), expected, atol=1e-5)


def test_the_adam_step_equals_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(start.clone())
    optimiser = torch.optim.Adam([theirs], lr=1e-3)
    ours = router.Adam(start, torch.zeros_like(start), torch.zeros_like(start), 0)
    for _ in range(5):
        theirs.grad = torch.randn(50, generator=generator, dtype=torch.float64)
        ours = router.adam_step(ours, theirs.grad, 1e-3)
        optimiser.step()
    np.testing.assert_allclose(ours.values, theirs.detach(), rtol=1e-12)


@pytest.mark.slow
def test_the_router_learns_to_prefer_silos_near_the_global_prototypes() -> None:
    run = population("rcsr", {"warmup": 0, "beta4": 0.0, "router_rate": 1e-2})
    protocol: Any = run.protocol
    generator = torch.Generator().manual_seed(3)
    target = torch.nn.functional.normalize(torch.randn(2, DIM, generator=generator), dim=-1)
    near = torch.nn.functional.normalize(target + 0.05 * torch.randn(2, DIM, generator=generator), dim=-1)
    pool = type(protocol._read(run.replies()))(
        torch.stack([near, -near, near, -near]),
        torch.ones(4, 2, dtype=torch.bool),
        torch.zeros(4, 4),
        torch.ones(4, dtype=torch.float64),
    )
    tensors = {**run.state.tensors, "prototypes": target, "prototypes_valid": torch.ones(2, dtype=torch.bool)}
    adam = router.Adam(*(tensors[name] for name in ("router", "router_first", "router_second")), 0)
    for step in range(60):
        adam, _ = protocol._router_stepped(adam, pool, tensors, step)
    weights = protocol._routed(adam.values, pool, tensors)
    assert float(weights[0] + weights[2]) > 0.9


# ------------------------------------------------------------------------- switches of the router
def _statistics(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Global prototypes [2, d], prototypes [4, 2, d] of silos of which 1 lacks texts and 2 images, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    target = unit(torch.randn(2, DIM, generator=generator, dtype=torch.float64))
    reported = unit(target + 0.5 * torch.randn(4, 2, DIM, generator=generator, dtype=torch.float64))
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]], dtype=torch.bool)
    return target, router.filled(reported, mask, target), mask


def test_masked_equation_9_is_that_of_the_paired_silos_alone() -> None:
    target, filled, mask = _statistics(0)
    weights = torch.tensor([0.1, 0.3, 0.4, 0.2], dtype=torch.float64)
    found = router.alignment_consistency(weights, filled, target, False, mask.double())
    directions = (filled[:, 0] - filled[:, 1]).numpy()[[0, 3]]
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    mixed = directions[0] / 3 + directions[1] * 2 / 3
    mixed /= np.linalg.norm(mixed)
    aim = (target[0] - target[1]).numpy()
    aim /= np.linalg.norm(aim)
    expected = 1 - mixed @ aim + (1 - directions[0] @ mixed) / 3 + (1 - directions[1] @ mixed) * 2 / 3
    np.testing.assert_allclose(float(found), expected, rtol=1e-12)
    without_pairs = router.alignment_consistency(weights, filled, target, False, torch.zeros(4, 2, dtype=torch.float64))
    assert math.isfinite(float(without_pairs))


@pytest.mark.parametrize("masked", [False, True])
def test_equation_9_pushes_the_router_to_silos_with_fillers_unless_masked(masked: bool) -> None:
    pushes = []
    for seed in range(200):
        target, filled, mask = _statistics(seed)
        scores = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        options = rcsr.RcsrOptions(beta1=0.0, beta2=0.0, beta4=0.0, beta5=1.0, masked_ac=masked)
        loss = router.loss(router.weights(scores), filled, mask, target, options)
        (gradient,) = torch.autograd.grad(loss, scores)
        pushes.append(float(-gradient[1:3].sum()))
    if masked:
        np.testing.assert_allclose(pushes, 0.0, atol=1e-15)
    else:
        assert np.mean(pushes) > 5 * np.std(pushes) / math.sqrt(len(pushes))


def test_a_router_trained_during_the_warm_up_changes_no_model_before_its_end() -> None:
    plain, trained = (population("rcsr", {"warmup": 3, "router_warmup_rate": rate}) for rate in (0.0, 1e-2))
    start = plain.state.tensors["router"]
    for _ in range(3):
        reported = plain.round(), trained.round()
    assert ["router_loss" in log for log in reported] == [False, True]
    assert torch.equal(plain.state.theta, trained.state.theta)
    assert torch.equal(plain.state.tensors["router"], start)
    assert not torch.equal(trained.state.tensors["router"], start)
    assert trained.state.values["router_steps"] == 2  # the first merge has no prototypes to train against
    plain.round(), trained.round()
    assert not torch.equal(plain.state.theta, trained.state.theta)


def test_the_router_trains_with_its_own_rate_after_the_warm_up() -> None:
    runs = [population("rcsr", {"warmup": 0, "router_warmup_rate": rate}) for rate in (0.0, 1e-2)]
    for run in runs:
        run.round()
        run.round()
    assert equal_states(runs[0].state, runs[1].state)


@pytest.mark.parametrize("minimax", [False, True])
def test_normalised_losses_do_not_tell_the_router_on_which_scale_a_group_trains(minimax: bool) -> None:
    def weights(kind: str, factor: float) -> torch.Tensor:
        run = population("rcsr", {"warmup": 0, "router_losses": kind, "minimax": minimax})
        protocol: Any = run.protocol
        read = protocol._read(run.replies())
        groups = torch.tensor([1.0, factor, factor, 1.0], dtype=torch.float64)
        pool = dataclasses.replace(read, losses=read.losses.clamp_min(0.01) * groups)
        routed: torch.Tensor = protocol._routed(run.state.tensors["router"], pool, run.state.tensors)
        return routed

    assert torch.allclose(weights("normalised", 1.0), weights("normalised", 7.0), atol=1e-12)
    assert not torch.allclose(weights("raw", 1.0), weights("raw", 7.0), atol=1e-6)


# ------------------------------------------------------------------------- merging branches
def _update(silo: SiloFacts, change: list[float]) -> Update:
    return Update(silo, 1, 0, 0, 1.0, (Delta("0" * 64, np.array(change, np.float32), 2),))


def test_a_branch_is_averaged_over_the_silos_that_trained_it() -> None:
    run = population("fedavg")
    branches = {"image": slice(0, 2), "text": slice(2, 4)}
    silos = run.context.silos
    updates = [
        _update(silos[0], [1, 1, 1, 1]),
        _update(silos[1], [3, 3, 9, 9]),  # image only: what it sends for text is ignored
    ]
    theta, half = torch.zeros(4), torch.tensor([0.5, 0.5], dtype=torch.float64)
    renormalised = aggregation.merge_updates(theta, updates, half, branches, branch_renorm=True)  # type: ignore[arg-type]
    assert renormalised.tolist() == [2, 2, 1, 1]
    printed = aggregation.merge_updates(theta, updates, half, branches, branch_renorm=False)  # type: ignore[arg-type]
    assert printed.tolist() == [2, 2, 0.5, 0.5]


def test_a_silo_merged_alone_receives_its_weight_among_all_silos_of_the_table() -> None:
    run = population("rcsr", {"personal": "router", "router_over": "table", "warmup": 0})
    run.round()
    alone = run.context.silos[0]
    run.round([alone])
    told = take(run.protocol.task(run.state, alone), RouterStatistics).weight
    assert told is not None and 0.0 < told < 0.9


# --------------------------------------------------------------------------------------------- RCSR-p and FedBridge-p
ON = {"personal": "router", "personal_onset": 0, "personal_epochs": 3, "personal_rate": 1.0, "warmup": 1}


def test_personalisation_changes_nothing_that_is_shared() -> None:
    plain, personal = population("rcsr", {"warmup": 1}), population("rcsr", ON)
    for _ in range(3):
        plain.round()
        personal.round()
        assert torch.equal(plain.state.theta, personal.state.theta)


def test_fedbridge_p_fits_adapters_only_to_pairs_and_never_shares_them() -> None:
    on = {"personal": True, "personal_onset": 0, "personal_epochs": 3, "personal_rate": 1.0}
    plain, personal = population("fedbridge"), population("fedbridge", on)
    for _ in range(3):
        plain.round()
        personal.round()
        assert torch.equal(plain.state.theta, personal.state.theta)
    has = {silo.index: personal_adapter.STATE in personal.personal[silo.index] for silo in personal.eligible}
    assert has == {silo.index: silo.paired for silo in personal.eligible}
    assert set(has.values()) == {True, False}
    assert not any(personal_adapter.STATE in plain.personal.get(silo.index, {}) for silo in plain.eligible)


@pytest.mark.parametrize("off", [{"anchor": False}, {"lambda_anc": 0.0}], ids=["no anchor", "an anchor of weight 0"])
def test_without_an_anchor_a_silo_that_lacks_a_modality_fits_no_adapter(off: dict[str, Any]) -> None:
    run, anchored = population("rcsr", {**ON, **off}), population("rcsr", ON)
    for _ in range(2):
        run.round()
        anchored.round()
    assert [personal_adapter.STATE in run.personal[silo.index] for silo in run.eligible] == [True, False, False, True]
    # An adapter from a time when the silo had both modalities is kept unchanged.
    for silo in run.context.silos[1:3]:
        run.personal[silo.index] = {**run.personal[silo.index], **anchored.personal[silo.index]}
        before = run.personal[silo.index][personal_adapter.STATE].clone()
        run.train(silo)
        assert torch.equal(run.personal[silo.index][personal_adapter.STATE], before)


@pytest.mark.slow
def test_adapters_never_leave_their_silos_and_survive_a_stop(tiny: Path, tmp_path: Path) -> None:
    settings = [f"protocol.{name}={value}" for name, value in ON.items()]
    scenario = threaded_run.resolved(tiny, *settings)
    whole = threaded_run.run(scenario, tmp_path / "whole").summary.plain()
    plain = threaded_run.run(threaded_run.resolved(tiny, "protocol.warmup=1"), tmp_path / "plain").summary.plain()

    # Uploads equal those without adapters to the byte; downloads also carry each silo's weight.
    assert whole["bytes"]["up"] == plain["bytes"]["up"]
    assert set(whole["bytes"]["down"]) - set(plain["bytes"]["down"]) == {"router_statistics"}
    kinds = {
        kind
        for silo in scenario.silo_names
        for _, record in read_log(RunFolder(tmp_path / "whole").messages(silo))
        if isinstance(record, MessageRecord) and record.action == "sent"
        for kind, _ in record.payloads
    }
    assert not any("adapter" in kind or "personal" in kind for kind in kinds)
    # Personal models are evaluated on the silos, which report the metrics.
    assert 0 < whole["personal"]["mean_r10"] <= 1
    assert set(whole["personal_per_silo"]) == set(scenario.silo_names)
    assert whole["model_digest"] == plain["model_digest"]
    assert any(
        "personal_adapter" in path.read_bytes()[:4096].decode("utf-8", "ignore")
        for path in (tmp_path / "whole").rglob("task-*.safetensors")
    )

    stops = iter([False] * 25 + [True] * 1000)
    threaded_run.run(scenario, tmp_path / "cut", stop_wanted=lambda: next(stops, True))
    again = threaded_run.run(scenario, tmp_path / "cut", resume=True).summary.plain()
    assert json.dumps(again["personal"]) == json.dumps(whole["personal"])
