"""What each baseline does beyond what every method does; equations are compared in test_golden_baselines.py."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import protocols
from coordinator.merging import merged_state
from fedmq.errors import InputError, RemoteWireError
from fedmq.messages import ClassPrototypes, Delta, Loss, PartialDelta, Representations
from fedmq.models.two_tower import Out
from fedmq.parts import Aggregation
from fedmq.privacy import transform
from fedmq.protocol import Checking, Local, Personalised, Reply, Task
from fedmq.runfolder import RunFolder
from fedmq.scenario import Base, Objective, Privacy, Training
from fedmq.stored import read_lines
from protocols import _class_prototypes, _clusters, _merge, creamfl, creamfl_public, fedproto
from protocols._own import OWN
from silos.program import Silo
from tests import inline
from tests.gradients import gradient_of
from tests.protocol_world import DIM, LABELS, MIXED, World, equal_states, world
from tests.threads import resolved

DSCMR = Objective(base="dscmr", bits=8, hidden=16)
#: options with which a method must be FedAvg
OFF: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.0},
    "moon": {"mu": 0.0},
    "fedmekt": {"weight": 0.0},
    "mfcpl": {"cmpr": 0.0, "cmpc": 0.0, "cma": 0.0},
    "creamfl": {"inter": 0.0, "intra": 0.0, "kd": 0.0},
}
PERSONALISED = ("fedper", "fedproto", "local", "pfedmma")


def payload_of(reply: Reply, kind: type[Any]) -> Any:
    (found,) = [payload for payload in reply.payloads if isinstance(payload, kind)]
    return found


def silo_of(run: World, index: int) -> Local:
    return Local(run.context.silos[index], run.shares[index], run.model, run.personal.get(index, {}))


def own_embeddings(run: World, index: int) -> torch.Tensor:
    """The first silo's images as another silo's own model embeds them."""
    assert isinstance(run.protocol, Personalised)
    payloads = run.protocol.task(run.state, run.context.silos[index])
    images = run.shares[0].image
    assert images is not None
    with torch.no_grad():
        return run.protocol.encoders(silo_of(run, index), payloads).image(images)


# --------------------------------------------------------------------------- degeneration
@pytest.mark.parametrize("name", list(OFF))
def test_with_its_terms_weighted_zero_a_method_is_fedavg_to_the_bit(name: str) -> None:
    plain, run = world("fedavg"), world(name, OFF[name])
    for _ in range(4):
        plain.round()
        run.round()
        assert torch.equal(run.state.theta, plain.state.theta)


@pytest.mark.parametrize("name", list(OFF))
def test_with_its_default_weights_it_is_not(name: str) -> None:
    plain, run = world("fedavg"), world(name)
    for _ in range(4):
        plain.round()
        run.round()
    assert not torch.equal(run.state.theta, plain.state.theta)


@pytest.mark.parametrize("name", list(OFF))
def test_so_it_is_on_a_supervised_base(name: str) -> None:
    plain = world("fedavg", objective=DSCMR)
    off, on = world(name, OFF[name], objective=DSCMR), world(name, objective=DSCMR)
    for _ in range(3):
        for run in (plain, off, on):
            run.round()
    assert torch.equal(off.state.theta, plain.state.theta)
    assert torch.isfinite(on.state.theta).all()
    assert not torch.equal(on.state.theta, plain.state.theta)


@pytest.mark.parametrize("name", ["central", "local", "fedper", "fedproto"])
def test_other_baselines_run_on_a_supervised_base(name: str) -> None:
    run = world(name, objective=DSCMR)
    for _ in range(2):
        run.round()
    moved = run.state.theta if name in ("central", "fedper") else run.personal[1][OWN]
    assert torch.isfinite(moved).all()
    assert not torch.equal(moved, run.model.initial())


@pytest.mark.slow
@pytest.mark.parametrize("base", [base for base in get_args(Base) if base != "info_nce"])
@pytest.mark.parametrize("name", ["central", "fedprox", "local", "moon"])
def test_general_baselines_run_on_every_base(name: str, base: str) -> None:
    run = world(name, objective=Objective.model_validate({"base": base, "bits": 8, "hidden": 16}))
    for _ in range(2):
        run.round()
    moved = run.personal[0][OWN] if name == "local" else run.state.theta
    assert torch.isfinite(moved).all()
    assert not torch.equal(moved, run.model.initial())


# --------------------------------------------------------------------------- FedProx, MOON, FedMEKT
def test_a_larger_mu_keeps_silos_nearer_to_the_downloaded_model() -> None:
    steps = []
    for mu in (0.0, 10.0, 1000.0):
        run = world("fedprox", {"mu": mu}, training=Training(batch_size=2, local_epochs=3, optimizer="sgd"))
        (reply,) = run.replies(run.eligible[:1])
        steps.append(np.linalg.norm(payload_of(reply, Delta).buffer))
    assert steps[0] > steps[1] > steps[2]


def test_moon_skips_the_contrast_where_a_silo_has_no_previous_model() -> None:
    plain, run = world("fedavg"), world("moon")
    for each in (plain, run):
        each.round()
    assert torch.equal(run.state.theta, plain.state.theta)
    for each in (plain, run):
        each.round()
    assert not torch.equal(run.state.theta, plain.state.theta)


def test_moon_keeps_the_model_its_training_ended_with() -> None:
    run = world("moon")
    (reply,) = run.replies(run.eligible[:1])
    ended = run.state.theta + torch.from_numpy(payload_of(reply, Delta).buffer)
    torch.testing.assert_close(run.personal[0][OWN], ended)


def test_moon_contrasts_with_as_many_last_models_as_its_buffer_holds() -> None:
    one, two = world("moon"), world("moon", {"buffer": 2})
    ends: list[torch.Tensor] = []
    for _ in range(3):
        for run in (one, two):
            run.round()
        ends.append(two.personal[0][OWN])
        if len(ends) == 2:  # there was no more than one last model so far
            assert torch.equal(one.state.theta, two.state.theta)
    assert not torch.equal(one.state.theta, two.state.theta)
    assert set(two.personal[0]) - set(one.personal[0]) == {f"{OWN}_1"}
    assert torch.equal(two.personal[0][f"{OWN}_1"], ends[1])


def test_a_strong_distillation_keeps_embeddings_near_the_global_ones() -> None:
    moved = []
    for weight in (0.0, 1e6):
        run = world("fedmekt", {"weight": weight, "temperature": 0.1}, training=Training(batch_size=4, local_epochs=4))
        before = run.model.image(run.shares[0].image).detach()
        run.train(run.eligible[0])
        moved.append(float((run.model.image(run.shares[0].image).detach() - before).norm()))
    assert moved[1] < 0.7 * moved[0]


@pytest.mark.parametrize("name", ["fedmekt", "moon"])
def test_silos_are_measured_by_their_last_local_model_if_asked(name: str) -> None:
    shared, own = world(name), world(name, {"personal": True})
    assert not shared.protocol.personalised  # type: ignore[attr-defined]
    assert own.protocol.personalised  # type: ignore[attr-defined]
    before = own_embeddings(own, 0)
    own.round()
    found = own_embeddings(own, 0)
    assert not torch.equal(found, before)
    assert not torch.equal(found, own_embeddings(own, 3))


# --------------------------------------------------------------------------- local and central
def test_local_training_sends_nothing_down_and_the_loss_up() -> None:
    run = world("local")
    for silo in run.eligible:
        assert run.protocol.task(run.state, silo) == ()
        assert [type(payload) for payload in run.train(silo).payloads] == [Loss]
    theta = run.state.theta.clone()
    run.round()
    assert torch.equal(run.state.theta, theta)


def test_a_local_model_goes_on_from_its_own_and_others_make_no_difference() -> None:
    alone, among = world("local"), world("local")
    for _ in range(3):
        alone.round(alone.eligible[:1])
        among.round()
    assert torch.equal(alone.personal[0][OWN], among.personal[0][OWN])
    first = alone.personal[0][OWN].clone()
    alone.round(alone.eligible[:1])
    step = alone.personal[0][OWN] - first
    assert 0 < float(step.norm()) < float((alone.personal[0][OWN] - alone.model.initial()).norm())


def test_central_training_asks_the_silo_that_holds_everything_and_takes_its_model() -> None:
    run = world("central")
    assert protocols.pooled("central")
    assert [silo.index for silo in run.eligible] == [0]
    (reply,) = run.replies()
    merged = run.protocol.merge(run.state, [reply], 0).state.theta
    torch.testing.assert_close(merged, run.model.flat.detach())


# --------------------------------------------------------------------------- personal layers
@pytest.mark.parametrize("name", ["fedper", "pfedmma"])
def test_personal_layers_never_leave_the_silo(name: str) -> None:
    run = world(name)
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
                _merge.places(run.model.layout, list(run.model.layout.by_name)),
                strict=True,
            )
            if not torch.equal(run.state.theta[place], before[place])
        }
        assert changed
        assert changed <= set(update.names)


@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_an_update_is_clipped_whether_it_is_of_all_layers_or_of_some(name: str) -> None:
    run = world(name)
    (reply,) = run.replies(run.eligible[:1])
    silo = types.SimpleNamespace(
        facts=reply.silo, scenario=types.SimpleNamespace(privacy=Privacy(clip_norm=1e-3), seed=0)
    )
    task = Task(1, 0, 0, 1e-3, ())
    sent = [Silo._transform(silo, payload, task) for payload in reply.payloads]  # type: ignore[arg-type]
    (update,) = [payload for payload in sent if isinstance(payload, Delta | PartialDelta)]
    assert float(np.linalg.norm(update.buffer)) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("name", PERSONALISED)
def test_each_silo_ends_up_with_a_model_of_its_own(name: str) -> None:
    run = world(name)
    assert isinstance(run.protocol, Personalised)
    assert run.protocol.personalised
    before = own_embeddings(run, 0)
    torch.testing.assert_close(before, own_embeddings(run, 3))
    run.round()
    run.round()
    assert not torch.equal(own_embeddings(run, 0), before)
    assert not torch.equal(own_embeddings(run, 0), own_embeddings(run, 3))


def test_fedper_shares_what_lies_below_the_head_or_what_it_is_told() -> None:
    layers = payload_of(world("fedper").replies()[0], PartialDelta).names
    assert all(".adapters." in name for name in layers)
    assert len(layers) == 8
    told = world("fedper", {"personal_layers": "text., visual.head.1"})
    layers = payload_of(told.replies()[0], PartialDelta).names
    assert {name.rpartition(".")[0] for name in layers} == {
        "visual.adapters.00.down",
        "visual.adapters.00.up",
        "visual.head.0",
    }


def test_fedper_keeps_the_common_space_of_a_supervised_network() -> None:
    run = world("fedper", objective=DSCMR)
    assert all(name.startswith(("visual.first.", "text.first.")) for name in run.protocol.partial.shared)  # type: ignore[attr-defined]


@pytest.mark.parametrize("layers", ["audio.", "visual.,text."])
def test_fedper_refuses_layers_that_are_not_there_and_a_model_all_personal(layers: str) -> None:
    with pytest.raises(InputError, match=r"protocol\.personal_layers"):
        world("fedper", {"personal_layers": layers})


def test_pfedmma_needs_a_backbone_with_shared_adapters() -> None:
    context = world("fedavg").context
    kind = protocols.load("pfedmma")
    with pytest.raises(InputError, match=r"backbone\.adapter.*mma"):
        kind(protocols.options_of(kind, {}), context)


def test_pfedmma_asks_every_silo_in_its_first_round_and_a_share_of_them_later(tiny: Path, tmp_path: Path) -> None:
    mma = ("protocol={name: pfedmma}", "backbone.adapter=mma", "participation=0.5")
    inline.run(resolved(tiny, *mma), tmp_path)
    merges = [line for line in read_lines(RunFolder(tmp_path).metrics) if line["kind"] == "merge"]
    assert [len(merge["replies"]) for merge in merges] == [4, 2, 2, 2]


def test_the_middle_layer_of_a_multi_modal_adapter_belongs_to_both_towers() -> None:
    model = world("pfedmma").model
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


# --------------------------------------------------------------------------- MFCPL
def prototype_kinds(run: World) -> dict[int, str]:
    """Silo index to the modality of the class prototypes it sends, for those that send any."""
    return {
        reply.silo.index: payload.modality
        for reply in run.replies()
        for payload in reply.payloads
        if isinstance(payload, ClassPrototypes)
    }


def test_with_labels_paired_silos_report_class_prototypes_from_the_first_round() -> None:
    run = world("mfcpl")
    assert prototype_kinds(run) == {0: "both", 3: "both"}
    run.round()
    valid = run.state.tensors[_class_prototypes.VALID]
    held = (run.shares[0].labels.sum(0) + run.shares[3].labels.sum(0)) > 0
    assert torch.equal(valid, held.repeat(2))


def test_without_labels_the_first_centroids_become_classes_that_stay() -> None:
    run = world("mfcpl", {"classes": 3}, labels=())
    assert prototype_kinds(run) == {0: "text", 3: "text"}
    run.round()
    classes = run.state.tensors["pseudo_classes"]
    assert classes.shape == (3, DIM)
    assert int(run.state.tensors["pseudo_classes_sizes"].sum()) == 16
    assert not run.state.tensors[_class_prototypes.VALID].any()
    assert prototype_kinds(run) == {0: "both", 3: "both"}
    run.round()
    assert torch.equal(run.state.tensors["pseudo_classes"], classes)
    assert int(run.state.tensors[_class_prototypes.COUNTS][0].sum()) == 2 * 11


@pytest.mark.parametrize("labels", [LABELS, ()], ids=["labels", "pseudo-classes"])
@pytest.mark.parametrize("index", [1, 2], ids=["images alone", "captions alone"])
def test_prototypes_teach_silos_that_lack_a_modality(labels: tuple[str, ...], index: int) -> None:
    training = Training(batch_size=8, local_epochs=2, weight_decay=0.0)
    updates = []
    for name in ("fedavg", "mfcpl"):
        run = world(name, {"lambda_anc": 0.0}, labels=labels, training=training)
        for _ in range(3):
            run.round()
        (reply,) = run.replies([run.context.silos[index]])
        updates.append(payload_of(reply, Delta).buffer)
    assert not updates[0].any()
    assert updates[1].any()


def test_no_pseudo_class_is_made_of_what_nobody_sent() -> None:
    run = world("mfcpl", {"classes": 3}, labels=(), kinds=((True, False), (False, True)), sizes=(6, 6))
    for _ in range(3):
        run.round()
    assert not run.state.tensors["pseudo_classes_sizes"].any()


# --------------------------------------------------------------------------- CreamFL
def test_the_bank_is_a_moving_average_of_what_downloaded_models_say_and_stays_in_the_silo() -> None:
    run = world("creamfl", {"bank_ema": 0.75}, kinds=((True, True),), sizes=(6,))
    assert run.protocol.uploads(run.eligible[0]) == world("fedavg").protocol.uploads(run.eligible[0])
    said = []
    for _ in range(2):
        run.model.load(run.state.theta)
        said.append(run.model.image(run.shares[0].image).detach())
        run.round()
    torch.testing.assert_close(run.personal[0]["creamfl_bank_image"], 0.75 * said[0] + 0.25 * said[1])


def test_creamfl_contrasts_directions_where_codes_have_any_length() -> None:
    generator = torch.Generator().manual_seed(0)
    z, banks = torch.randn(6, 32, generator=generator), torch.randn(2, 6, 32, generator=generator)
    step = types.SimpleNamespace(rows=np.arange(6))

    def terms(scale: float, directions: bool) -> float:
        shared = {"image": banks[0] * scale, "text": banks[1] * scale}
        weights = creamfl.Weights(1.0, 1.0, 0.0, 0.07, directions)
        extra = creamfl.contrasts(shared, {"image": -banks[0] * scale}, weights)
        found = extra(step, Out(z, z, z * scale), None)  # type: ignore[arg-type, misc]
        assert found is not None
        return float(found)

    assert terms(10.0, True) == pytest.approx(terms(1.0, True), rel=1e-4)
    assert terms(1.0, True) < 20
    assert terms(10.0, False) > 100
    objective = Objective(base="dcmh", bits=8, hidden=16)
    runs = [world(name, objective=objective) for name in ("creamfl", "fedavg")]
    hashing = [run.train(run.context.silos[0]).loss for run in runs]
    assert hashing[0] - hashing[1] < 20  # the two contrasts of unit vectors at .07 are at most 2 / .07 + log n each


def test_fedper_keeps_a_hash_layer_and_the_classifier_above_it() -> None:
    run = world("fedper", objective=Objective(base="greedyhash", bits=8, hidden=16))
    shared = {name.rpartition(".")[0] for name in run.protocol.layers}  # type: ignore[attr-defined]
    assert not {name for name in shared if "last" in name or "head" in name}, shared


def test_a_silo_whose_data_changed_starts_a_new_bank() -> None:
    run = world("creamfl", kinds=((True, True),), sizes=(6,))
    run.round()
    run.shares = {0: dataclasses.replace(run.shares[0], rows=run.shares[0].rows + 1)}
    run.model.load(run.state.theta)
    said = run.model.image(run.shares[0].image).detach()
    run.round()
    torch.testing.assert_close(run.personal[0]["creamfl_bank_image"], said)


def test_with_a_public_set_representations_travel_and_parameters_do_not() -> None:
    run = world("creamfl_public")
    items = len(run.protocol.public)  # type: ignore[attr-defined]
    for _ in range(2):
        for reply in run.replies():
            sent = payload_of(reply, Representations)
            assert sent.values.shape == (items * (2 if reply.silo.paired else 1), DIM)
            assert {type(payload) for payload in reply.payloads} == {Representations, Loss}
        run.round()
        (down,) = run.protocol.task(run.state, run.eligible[0])
        run.model.load(run.state.theta)
        said = run.model.image(run.protocol.public.image).detach()  # type: ignore[attr-defined]
        torch.testing.assert_close(torch.from_numpy(down.values[:items].astype(np.float32)), said, atol=1e-3, rtol=0)


def test_of_a_model_that_goes_part_of_the_way_its_own_representations_go_down() -> None:
    run = world("creamfl_public", {"server_rate": 1e-2})
    aggregation = Aggregation(mode="async", mixing=0.3)
    setting: Any = types.SimpleNamespace(
        protocol=run.protocol, context=run.context, scenario=types.SimpleNamespace(aggregation=aggregation)
    )
    merged, _ = merged_state(setting, run.state, run.replies(run.eligible[:1]), 0)
    run.model.load(merged.state.theta)
    said = run.model.image(run.protocol.public.image).detach()  # type: ignore[attr-defined]
    torch.testing.assert_close(merged.state.tensors["public_image"], said)
    whole = run.protocol.merge(run.state, run.replies(run.eligible[:1]), 0).state
    assert not torch.allclose(whole.tensors["public_image"], said)


def test_public_training_alone_teaches_the_coordinator_where_nobody_replies_with_a_modality() -> None:
    run = world("creamfl_public", kinds=((True, False),), sizes=(5,))
    log = run.round()
    assert log["server_loss"] > 0
    assert not torch.equal(run.state.theta, run.model.initial())


def test_the_silo_whose_representation_finds_its_pair_weighs_more() -> None:
    shared = torch.eye(3)
    good, bad = 5 * torch.eye(3), 5 * torch.eye(3).roll(1, 0)
    weights = creamfl_public.item_weights(torch.stack([good, bad]), shared)
    assert (weights[0] > 0.9).all()
    torch.testing.assert_close(weights.sum(0), torch.ones(3))


def test_creamfl_with_a_public_set_refuses_data_without_one() -> None:
    context = dataclasses.replace(world("fedavg").context, public=lambda: None)
    kind = protocols.load("creamfl_public")
    with pytest.raises(InputError, match="public"):
        kind(protocols.options_of(kind, {}), context)


# --------------------------------------------------------------------------- what a peer may not send
def resized(payload: Any) -> Any:
    """A payload with one row too few."""
    match payload:
        case ClassPrototypes(prototypes=rows, counts=counts, modality=modality):
            return ClassPrototypes(rows[:-1].copy(), counts[:-1].copy(), modality)
        case Representations(values=values, modality=modality):
            return Representations(values[:-1].copy(), modality)
        case _:
            return payload


def test_noise_does_not_make_an_idle_silo_one_that_trained() -> None:
    kinds, private = (
        ((True, True), (True, True), (True, False), (False, True)),
        Privacy(clip_norm=10, noise_multiplier=1e-7),
    )
    run = world("fedavg", {"single_modality": "idle"}, kinds=kinds)

    def sent(reply: Reply) -> Reply:
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


@pytest.mark.parametrize("name", ["creamfl_public", "fedproto", "mfcpl"])
def test_payloads_of_another_shape_are_refused_before_the_merge(name: str) -> None:
    run = world(name)
    assert isinstance(run.protocol, Checking)
    (reply,) = run.replies(run.eligible[:1])
    run.protocol.check(reply.payloads)
    with pytest.raises(RemoteWireError):
        run.protocol.check([resized(payload) for payload in reply.payloads])


# --------------------------------------------------------------------------- FedProto
def test_fedproto_refuses_data_without_labels_in_one_line() -> None:
    with pytest.raises(InputError) as caught:
        world("fedproto", labels=())
    assert "fedproto" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_silos_are_pulled_to_the_prototypes_of_their_classes() -> None:
    run = world("fedproto", {"weight": 100.0}, training=Training(batch_size=11, local_epochs=30))
    run.round()
    shared = run.state.tensors[_class_prototypes.GLOBAL][: len(LABELS)]

    def distance() -> float:
        valid = torch.ones(len(LABELS), dtype=torch.bool)
        return float(fedproto.prototype_loss(own_embeddings(run, 0), run.shares[0].labels, shared, valid))

    before = distance()
    run.train(run.eligible[0], learning_rate=1e-2)
    assert distance() < 0.5 * before


def test_fedproto_without_its_term_is_local_training() -> None:
    alone, run = world("local"), world("fedproto", {"weight": 0.0})
    for _ in range(3):
        alone.round()
        run.round()
    assert all(torch.equal(alone.personal[i][OWN], run.personal[i][OWN]) for i in range(len(MIXED)))


def test_rows_of_a_modality_that_a_silo_lacks_are_never_used() -> None:
    run = world("fedproto")
    replies = run.replies()
    honest = run.protocol.merge(run.state, replies, 0).state
    found = payload_of(replies[1], ClassPrototypes)
    half = len(LABELS)
    rows, counts = found.prototypes.copy(), found.counts.copy()
    rows[half:], counts[half:] = 100.0, 5
    lie = ClassPrototypes(rows, counts, "both")
    replies[1] = dataclasses.replace(replies[1], payloads=(lie, replies[1].payloads[1]))
    spoilt = run.protocol.merge(run.state, replies, 0).state
    for name in (_class_prototypes.GLOBAL, _class_prototypes.VALID):
        assert torch.equal(honest.tensors[name], spoilt.tensors[name])


def test_fused_prototypes_take_the_modality_that_is_there() -> None:
    run = world("fedproto", {"proto_modal": "fused"}, kinds=((True, False), (False, True)), sizes=(8, 8))
    for _ in range(2):
        run.round()
    assert all(not torch.equal(run.personal[i][OWN], run.model.initial()) for i in range(2))


# --------------------------------------------------------------------------- tables and clusters
def test_the_table_forgets_a_silo_after_its_age_and_ignores_older_reports() -> None:
    run = world("fedproto", kinds=((True, True),) * 2, sizes=(8, 8))
    tensors = run.state.tensors
    first, second = [(reply, payload_of(reply, ClassPrototypes)) for reply in run.replies()]
    tensors = _class_prototypes.updated(tensors, [first, second], 0, max_age=2, weighted=False)
    both = tensors[_class_prototypes.GLOBAL]
    later = dataclasses.replace(second[0], base_version=3), second[1]
    tensors = _class_prototypes.updated(tensors, [later], 3, max_age=2, weighted=False)
    assert not torch.equal(tensors[_class_prototypes.GLOBAL], both)
    torch.testing.assert_close(tensors[_class_prototypes.GLOBAL], torch.from_numpy(second[1].prototypes))
    again = _class_prototypes.updated(tensors, [second], 3, max_age=None, weighted=False)
    assert int(again[_class_prototypes.VERSIONS][1]) == 3


def test_a_sample_with_two_labels_counts_in_both_classes() -> None:
    features = torch.tensor([[2.0, 0.0], [4.0, 2.0]])
    means, counts = _class_prototypes.class_means(features, torch.tensor([[1, 1, 0], [0, 1, 0]]))
    assert means.tolist() == [[2.0, 0.0], [3.0, 1.0], [0.0, 0.0]]
    assert counts.tolist() == [1, 2, 0]


def test_k_means_finds_groups_that_lie_apart_whatever_their_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    points = (centres[:, None] + 0.1 * torch.randn(3, 7, 2, generator=generator)).flatten(0, 1)
    weights = torch.arange(1.0, 22.0)
    found, held = _clusters.k_means(points, weights, 3, np.random.default_rng(1))
    order = _clusters.nearest(centres, found)
    assert sorted(order.tolist()) == [0, 1, 2]
    torch.testing.assert_close(found[order].float(), centres, atol=0.2, rtol=0)
    assert held[order].tolist() == [28.0, 77.0, 126.0]


def test_k_means_leaves_rows_empty_where_points_repeat() -> None:
    found, held = _clusters.k_means(torch.ones(5, 2), torch.ones(5), 3, np.random.default_rng(0))
    assert held.tolist() == [5.0, 0.0, 0.0]
    assert not found[1:].any()


@pytest.mark.parametrize("name", ["creamfl", "fedmekt", "mfcpl"])
def test_a_method_we_had_to_interpret_says_so(name: str) -> None:
    assert protocols.load(name).our_reading  # type: ignore[attr-defined]
    assert "our reading" in protocols.summary(name)


@pytest.mark.parametrize("name", ["creamfl", "fedper", "fedproto", "local", "mfcpl", "moon"])
def test_runs_repeat_to_the_bit(name: str) -> None:
    runs = [world(name), world(name)]
    for _ in range(2):
        for run in runs:
            run.round()
    assert equal_states(runs[0].state, runs[1].state)
    for index, kept in runs[0].personal.items():
        assert all(torch.equal(kept[key], runs[1].personal[index][key]) for key in kept)


@pytest.mark.parametrize("base", ["dcmh", "shdch", "dgcpn"])
def test_moon_contrasts_both_towers_of_a_hash_network(base: Any) -> None:
    objective = Objective(base=base, bits=8, hidden=16)
    runs = [world(name, objective=objective, kinds=[(True, True)] * 2, sizes=[9, 7]) for name in ("moon", "fedavg")]
    for run in runs:
        for _ in range(3):
            run.round()
    apart = (runs[0].state.theta - runs[1].state.theta).abs()
    for modality in ("image", "text"):
        assert float(apart[runs[0].model.branch(modality)].max()) > 1e-5, modality
