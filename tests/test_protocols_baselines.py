"""Behaviour specific to each baseline; equations are compared in test_golden_baselines.py."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import protocols
from fedmq.config.scenario import Objective, ProtocolChoice, Training
from fedmq.config.sections import Privacy
from fedmq.errors import InputError
from fedmq.federation.protocol import Task, Update
from fedmq.federation.updates import transform
from fedmq.wire.payloads import ClassPrototypes, Delta, Loss, PartialDelta, Representations
from protocols.parts import aggregation
from protocols.parts.personal_model import OWN
from silos.tasks import Silo
from tests import in_process_run
from tests.gradients import gradient_of
from tests.replies import own_embeddings, payload_of
from tests.small_federation import DIM, equal_states, population
from tests.threaded_run import resolved

DSCMR = Objective(base="dscmr", bits=8, hidden=16)
#: options with which a method equals FedAvg
OFF: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.0},
    "moon": {"mu": 0.0},
    "fedmekt": {"weight": 0.0},
    "mfcpl": {"cmpr": 0.0, "cmpc": 0.0, "cma": 0.0},
    "creamfl": {"inter": 0.0, "intra": 0.0, "kd": 0.0},
}
PERSONALISED = ("fedper", "fedproto", "local", "pfedmma")


# --------------------------------------------------------------------------- degeneration
@pytest.mark.parametrize("name", list(OFF))
def test_with_zero_term_weights_a_method_equals_fedavg_to_the_bit(name: str) -> None:
    plain, run = population("fedavg"), population(name, OFF[name])
    for _ in range(4):
        plain.round()
        run.round()
        assert torch.equal(run.state.theta, plain.state.theta)


@pytest.mark.parametrize("name", list(OFF))
def test_with_default_term_weights_a_method_differs_from_fedavg(name: str) -> None:
    plain, run = population("fedavg"), population(name)
    for _ in range(4):
        plain.round()
        run.round()
    assert not torch.equal(run.state.theta, plain.state.theta)


@pytest.mark.parametrize("name", list(OFF))
def test_on_a_supervised_base_only_zero_term_weights_equal_fedavg(name: str) -> None:
    plain = population("fedavg", objective=DSCMR)
    off, on = population(name, OFF[name], objective=DSCMR), population(name, objective=DSCMR)
    for _ in range(3):
        for run in (plain, off, on):
            run.round()
    assert torch.equal(off.state.theta, plain.state.theta)
    assert torch.isfinite(on.state.theta).all()
    assert not torch.equal(on.state.theta, plain.state.theta)


@pytest.mark.parametrize("name", ["central", "local", "fedper", "fedproto"])
def test_other_baselines_run_on_a_supervised_base(name: str) -> None:
    run = population(name, objective=DSCMR)
    for _ in range(2):
        run.round()
    moved = run.state.theta if name in ("central", "fedper") else run.personal[1][OWN]
    assert torch.isfinite(moved).all()
    assert not torch.equal(moved, run.model.initial())


@pytest.mark.slow
@pytest.mark.parametrize("base", protocols.losses())
@pytest.mark.parametrize("name", ["central", "fedprox", "local", "moon"])
def test_general_baselines_run_on_every_base(name: str, base: str) -> None:
    run = population(name, objective=Objective.model_validate({"base": base, "bits": 8, "hidden": 16}))
    for _ in range(2):
        run.round()
    moved = run.personal[0][OWN] if name == "local" else run.state.theta
    assert torch.isfinite(moved).all()
    assert not torch.equal(moved, run.model.initial())


# --------------------------------------------------------------------------- FedProx, MOON, FedMEKT
def test_a_larger_mu_keeps_silos_closer_to_the_downloaded_model() -> None:
    steps = []
    for mu in (0.0, 10.0, 1000.0):
        run = population("fedprox", {"mu": mu}, training=Training(batch_size=2, local_epochs=3, optimizer="sgd"))
        (reply,) = run.replies(run.eligible[:1])
        steps.append(np.linalg.norm(payload_of(reply, Delta).buffer))
    assert steps[0] > steps[1] > steps[2]


def test_moon_skips_the_contrast_of_a_silo_without_a_previous_model() -> None:
    plain, run = population("fedavg"), population("moon")
    for each in (plain, run):
        each.round()
    assert torch.equal(run.state.theta, plain.state.theta)
    for each in (plain, run):
        each.round()
    assert not torch.equal(run.state.theta, plain.state.theta)


def test_moon_keeps_the_model_at_the_end_of_local_training() -> None:
    run = population("moon")
    (reply,) = run.replies(run.eligible[:1])
    ended = run.state.theta + torch.from_numpy(payload_of(reply, Delta).buffer)
    torch.testing.assert_close(run.personal[0][OWN], ended)


@pytest.mark.parametrize(("name", "options"), [("moon", {"buffer": 2}), ("fedmekt", {"personal": True})])
def test_an_idle_silo_keeps_no_previous_model(name: str, options: dict[str, Any]) -> None:
    run = population(name, options)
    image_only = run.context.silos[1]
    (reply,) = run.replies([image_only])  # no silo has reported captions yet, so there is no anchor
    assert not payload_of(reply, Delta).buffer.any()
    assert OWN not in run.personal[1]
    untold = run.state
    for _ in range(3):
        run.round()
    before = run.personal[1]
    assert not torch.equal(before[OWN], run.model.initial())
    run.state = dataclasses.replace(untold, theta=run.state.theta)
    run.train(image_only)
    assert run.personal[1].keys() == before.keys()
    assert all(torch.equal(run.personal[1][key], value) for key, value in before.items())


@pytest.mark.parametrize(("name", "weight"), [("moon", "mu"), ("fedmekt", "weight")])
def test_a_silo_whose_training_changed_nothing_still_keeps_its_model(name: str, weight: str) -> None:
    """One pair has an InfoNCE of zero; without weight decay training returns the downloaded model, which is kept."""
    still = Training(optimizer="sgd", weight_decay=0.0)
    run = population(name, {"personal": True, weight: 0.0}, kinds=((True, True),), sizes=(1,), training=still)
    (reply,) = run.replies()
    assert not payload_of(reply, Delta).buffer.any()
    assert torch.equal(run.personal[0][OWN], run.state.theta)


def test_moon_contrasts_with_all_previous_models_in_its_buffer() -> None:
    one, two = population("moon"), population("moon", {"buffer": 2})
    ends: list[torch.Tensor] = []
    for _ in range(3):
        for run in (one, two):
            run.round()
        ends.append(two.personal[0][OWN])
        if len(ends) == 2:  # so far there was at most one previous model
            assert torch.equal(one.state.theta, two.state.theta)
    assert not torch.equal(one.state.theta, two.state.theta)
    assert set(two.personal[0]) - set(one.personal[0]) == {f"{OWN}_1"}
    assert torch.equal(two.personal[0][f"{OWN}_1"], ends[1])


def test_strong_distillation_keeps_embeddings_close_to_the_global_ones() -> None:
    moved = []
    for weight in (0.0, 1e6):
        run = population(
            "fedmekt", {"weight": weight, "temperature": 0.1}, training=Training(batch_size=4, local_epochs=4)
        )
        before = run.model.image(run.shares[0].image).detach()
        run.train(run.eligible[0])
        moved.append(float((run.model.image(run.shares[0].image).detach() - before).norm()))
    assert moved[1] < 0.7 * moved[0]


@pytest.mark.parametrize("name", ["fedmekt", "moon"])
def test_silos_are_evaluated_with_their_last_local_model_if_configured(name: str) -> None:
    shared, own = population(name), population(name, {"personal": True})
    assert not shared.protocol.traits().personalised
    assert own.protocol.traits().personalised
    before = own_embeddings(own, 0)
    own.round()
    found = own_embeddings(own, 0)
    assert not torch.equal(found, before)
    assert not torch.equal(found, own_embeddings(own, 3))


# --------------------------------------------------------------------------- local and central
def test_local_training_downloads_nothing_and_uploads_the_loss() -> None:
    run = population("local")
    for silo in run.eligible:
        assert run.protocol.task(run.state, silo) == ()
        assert [type(payload) for payload in run.train(silo).payloads] == [Loss]
    theta = run.state.theta.clone()
    run.round()
    assert torch.equal(run.state.theta, theta)


def test_local_training_resumes_from_the_silos_own_model_independently_of_others() -> None:
    alone, among = population("local"), population("local")
    for _ in range(3):
        alone.round(alone.eligible[:1])
        among.round()
    assert torch.equal(alone.personal[0][OWN], among.personal[0][OWN])
    first = alone.personal[0][OWN].clone()
    alone.round(alone.eligible[:1])
    step = alone.personal[0][OWN] - first
    assert 0 < float(step.norm()) < float((alone.personal[0][OWN] - alone.model.initial()).norm())


def test_central_training_selects_the_silo_with_all_data_and_takes_its_model() -> None:
    run = population("central")
    assert run.protocol.traits().pooled
    assert [silo.index for silo in run.eligible] == [0]
    (reply,) = run.replies()
    merged = run.protocol.merge(run.state, [reply], 0).state.theta
    torch.testing.assert_close(merged, run.model.flat.detach())


# --------------------------------------------------------------------------- personal layers
@pytest.mark.parametrize("name", ["fedper", "pfedmma"])
def test_personal_layers_never_leave_the_silo(name: str) -> None:
    run = population(name)
    for _ in range(2):
        for reply in (replies := run.replies()):
            update = payload_of(reply, PartialDelta)
            assert not any(".head." in layer for layer in update.names)
            assert update.buffer.size == run.model.layout.part(update.names).size
            personal = [entry.name for entry in run.model.layout.entries if entry.name not in update.names]
            assert run.personal[reply.silo.index][OWN].numel() == run.model.layout.part(personal).size
        before = run.state.theta
        run.state = run.protocol.merge(run.state, replies, run.version).state
        run.version += 1
        changed = {
            entry.name
            for entry, place in zip(
                run.model.layout.entries,
                aggregation.places(run.model.layout, list(run.model.layout.by_name)),
                strict=True,
            )
            if not torch.equal(run.state.theta[place], before[place])
        }
        assert changed
        assert changed <= set(update.names)


@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_updates_of_all_layers_and_of_some_layers_are_clipped(name: str) -> None:
    run = population(name)
    (reply,) = run.replies(run.eligible[:1])
    scenario = types.SimpleNamespace(privacy=Privacy(clip_norm=1e-3))
    silo = types.SimpleNamespace(facts=reply.silo, scenario=scenario, _noise=0)
    task = Task(1, 0, 0, 1e-3, ())
    sent = [Silo.transform(silo, payload, task) for payload in reply.payloads]  # type: ignore[arg-type]
    (update,) = [payload for payload in sent if isinstance(payload, Delta | PartialDelta)]
    assert float(np.linalg.norm(update.buffer)) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("name", PERSONALISED)
def test_each_silo_ends_with_a_different_personal_model(name: str) -> None:
    run = population(name)
    assert run.protocol.traits().personalised
    before = own_embeddings(run, 0)
    torch.testing.assert_close(before, own_embeddings(run, 3))
    run.round()
    run.round()
    assert not torch.equal(own_embeddings(run, 0), before)
    assert not torch.equal(own_embeddings(run, 0), own_embeddings(run, 3))


def test_fedper_shares_the_layers_below_the_head_or_the_configured_ones() -> None:
    layers = payload_of(population("fedper").replies()[0], PartialDelta).names
    assert all(".adapters." in name for name in layers)
    assert len(layers) == 8
    told = population("fedper", {"personal_layers": "text., visual.head.1"})
    layers = payload_of(told.replies()[0], PartialDelta).names
    assert {name.rpartition(".")[0] for name in layers} == {
        "visual.adapters.00.down",
        "visual.adapters.00.up",
        "visual.head.0",
    }


def test_fedper_keeps_the_common_space_of_a_supervised_network_personal() -> None:
    run = population("fedper", objective=DSCMR)
    assert all(name.startswith(("visual.first.", "text.first.")) for name in run.protocol.partial.shared)  # type: ignore[attr-defined]


def test_pfedmma_needs_a_backbone_with_shared_adapters() -> None:
    context = population("fedavg").context
    with pytest.raises(InputError, match=r"backbone\.adapter.*mma"):
        protocols.create(ProtocolChoice(name="pfedmma"), context)


def test_pfedmma_selects_every_silo_in_the_first_round_and_a_fraction_later(tiny: Path, tmp_path: Path) -> None:
    mma = ("protocol={name: pfedmma}", "backbone.adapter=mma", "participation=0.5")
    in_process_run.run(resolved(tiny, *mma), tmp_path)
    merges = in_process_run.lines(tmp_path, "merge")
    assert [len(merge["replies"]) for merge in merges] == [4, 2, 2, 2]


def test_the_middle_layer_of_a_multi_modal_adapter_belongs_to_both_towers() -> None:
    model = population("pfedmma").model
    assert [entry.name for entry in model.layout.entries if entry.name.startswith("shared.")] == [
        "shared.adapters.00.bias",
        "shared.adapters.00.weight",
    ]
    with torch.no_grad():
        model.flat.fill_(0.1)
    for embed in (model.image, model.caption):
        model.zero_grad()
        embed(torch.arange(2.0 * DIM).view(2, DIM))[:, 0].sum().backward()
        assert gradient_of(model)[model.branch("shared")].any()


def test_fedper_keeps_the_hash_layer_and_its_classifier_personal() -> None:
    run = population("fedper", objective=Objective(base="greedyhash", bits=8, hidden=16))
    layers = run.protocol.traits().shared_layers
    shared = {name.rpartition(".")[0] for name in layers or ()}
    assert not {name for name in shared if "last" in name or "head" in name}, shared


# --------------------------------------------------------------------------- payloads that are refused
def resized(payload: Any) -> Any:
    """A payload with one row too few."""
    match payload:
        case ClassPrototypes(prototypes=rows, counts=counts, modality=modality):
            return ClassPrototypes(rows[:-1].copy(), counts[:-1].copy(), modality)
        case Representations(values=values, modality=modality):
            return Representations(values[:-1].copy(), modality)
        case _:
            return payload


def test_noise_does_not_make_an_idle_silo_count_as_trained() -> None:
    kinds, private = (
        ((True, True), (True, True), (True, False), (False, True)),
        Privacy(clip_norm=10, noise_multiplier=1e-7),
    )
    run = population("fedavg", {"single_modality": "idle"}, kinds=kinds)

    def sent(reply: Update) -> Update:
        path = (reply.silo.name, 0, 1)
        payloads = tuple(
            dataclasses.replace(each, buffer=transform(np.array(each.buffer), private, 0, path))
            if isinstance(each, Delta)
            else each
            for each in reply.payloads
        )
        return dataclasses.replace(reply, payloads=payloads)

    replies = run.replies()
    plain, noisy = (run.protocol.merge(run.state, each, 0).state.theta for each in (replies, list(map(sent, replies))))
    assert not torch.equal(plain, noisy)
    torch.testing.assert_close(noisy, plain)


@pytest.mark.parametrize("name", ["creamfl", "fedmekt", "mfcpl"])
def test_a_method_that_needed_interpretation_says_so_in_its_summary(name: str) -> None:
    assert population(name).protocol.traits().our_reading
    assert "our reading" in protocols.summary(name)


@pytest.mark.parametrize("name", ["creamfl", "fedper", "fedproto", "local", "mfcpl", "moon"])
def test_runs_repeat_to_the_bit(name: str) -> None:
    runs = [population(name), population(name)]
    for _ in range(2):
        for run in runs:
            run.round()
    assert equal_states(runs[0].state, runs[1].state)
    for index, kept in runs[0].personal.items():
        assert all(torch.equal(kept[key], runs[1].personal[index][key]) for key in kept)


@pytest.mark.parametrize("base", ["dcmh", "shdch", "dgcpn"])
def test_moon_contrasts_both_towers_of_a_hash_network(base: Any) -> None:
    objective = Objective(base=base, bits=8, hidden=16)
    runs = [
        population(name, objective=objective, kinds=[(True, True)] * 2, sizes=[9, 7]) for name in ("moon", "fedavg")
    ]
    for run in runs:
        for _ in range(3):
            run.round()
    apart = (runs[0].state.theta - runs[1].state.theta).abs()
    for modality in ("image", "text"):
        assert float(apart[runs[0].model.branch(modality)].max()) > 1e-5, modality
