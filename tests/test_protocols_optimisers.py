"""FedAdam, FedYogi, SCAFFOLD, FedNova, Ditto and FedRep against numpy versions written from their papers.

The gradients are those of the silo in ``tests/foreign``, float64 without automatic differentiation. A silo here has one
caption per item; except for FedNova its items fit into one batch, so that the order of items has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmq.config.scenario import Training
from fedmq.errors import InputError, RemoteWireError
from fedmq.federation.protocol import Update
from fedmq.wire.payloads import LocalSteps, ModalityPrototypes, PartialDelta
from protocols.fednova import gradient_weight
from protocols.parts.personal_model import OWN
from tests import in_process_run
from tests.foreign.training import Array, Options, Parameters, Tower, _batch
from tests.replies import payload_of, with_payload
from tests.small_federation import ADAPTERS, SmallFederation, population
from tests.threaded_run import resolved

RATE, STEPS = 0.2, 3
ALL = (0, 1, 2, 3)  # paired, images only, captions only, paired
HELD = {0: ("visual.", "text."), 1: ("visual.",), 2: ("text.",), 3: ("visual.", "text.")}
SAMPLES = {0: 11, 1: 9, 2: 7, 3: 5}
TOWERS = ("visual.", "text.")


def federation(name: str, options: Mapping[str, Any] | None = None, **training: Any) -> SmallFederation:
    """Four silos that take plain gradient steps on all their items."""
    settings = {"momentum": 0.0, "batch_size": 64, "local_epochs": STEPS, **training}
    plain = Training(
        optimizer="sgd", weight_decay=0.0, learning_rate=RATE, schedule="constant", warmup_rounds=0, **settings
    )
    run = population(name, options, training=plain)
    run.shares = {i: replace(share, captions=torch.ones_like(share.captions)) for i, share in run.shares.items()}
    return run


def replies(run: SmallFederation, silos: Sequence[int]) -> list[Update]:
    return [run.reply(run.context.silos[i], run.train(run.context.silos[i], RATE)) for i in silos]


def merge(run: SmallFederation, given: Sequence[Update]) -> None:
    run.state, run.version = run.protocol.merge(run.state, given, run.version).state, run.version + 1


def named(run: SmallFederation, flat: torch.Tensor) -> Parameters:
    """A buffer [P] by parameter name, float64."""
    views = run.model.layout.views(np.ascontiguousarray(flat.numpy()))
    return {name: view.astype(np.float64) for name, view in views.items()}


def near(found: Parameters, wanted: Parameters, tolerance: float = 1e-6) -> None:
    assert wanted
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=tolerance, err_msg=name)


def known(run: SmallFederation) -> dict[str, Array]:
    """The prototypes that a task marks as known, by tower."""
    task = run.protocol.task(run.state, run.context.silos[0])
    (sent,) = (each for each in task if isinstance(each, ModalityPrototypes))
    rows = {"visual.": sent.image, "text.": sent.text}
    return {name: rows[name].astype(np.float64) for bit, name in enumerate(TOWERS) if sent.mask >> bit & 1}


def gradient(run: SmallFederation, index: int, theta: Parameters, anchors: Mapping[str, Array]) -> Parameters:
    """Gradient of a silo's loss on all its items, of the parameters of its towers."""
    share = run.shares[index]
    items = {}
    if share.image is not None:
        items["visual."] = share.image.numpy().astype(np.float64)
    if share.text is not None:
        items["text."] = share.text[:, 0].numpy().astype(np.float64)
    towers = {name: Tower(theta, name) for name in items}
    codes = {name: towers[name].forward(x) for name, x in items.items()}
    _, slopes = _batch(codes, anchors, Options(lambda_a=0.0, lambda_s=0.0))
    return {key: part for name, slope in slopes.items() for key, part in towers[name].backward(slope).items()}


def trains(index: int, anchors: Mapping[str, Array]) -> bool:
    """Whether a silo has a loss: a pair's contrast, or the prototype of the modality that it lacks."""
    return len(HELD[index]) == 2 or any(name in anchors for name in TOWERS if name not in HELD[index])


def weighted(run: SmallFederation, given: Sequence[Update]) -> Parameters:
    """Mean of the updates by samples, each tower over the silos that trained it."""
    found, updates = {}, [(SAMPLES[each.silo.index], named(run, each.delta)) for each in given]
    for tower in TOWERS:
        layers = [name for name in updates[0][1] if name.startswith(tower)]
        active = [(n, update) for n, update in updates if any(update[name].any() for name in layers)]
        total = sum(n for n, _ in active) or 1
        for name in layers:
            found[name] = sum((n / total * update[name] for n, update in active), 0 * updates[0][1][name])
    return found


# ------------------------------------------------------------------------------------------------- FedAdam, FedYogi
@pytest.mark.parametrize("optimizer", ["adam", "yogi"])
def test_the_coordinators_steps_are_those_of_algorithm_2_and_a_branch_without_silos_stays(optimizer: str) -> None:
    run = federation("fedopt", {"optimizer": optimizer, "server_rate": 0.03, "adaptivity": 2e-3})
    x = named(run, run.state.theta)
    m, v = {name: 0 * each for name, each in x.items()}, {name: 0 * each + 2e-3**2 for name, each in x.items()}
    for silos in (ALL, ALL, (2,), ALL):  # in the third round no silo has images
        given = replies(run, silos)
        for name, update in weighted(run, given).items():
            if not any(name.startswith(tower) for i in silos for tower in HELD[i]):
                continue
            m[name] = 0.9 * m[name] + 0.1 * update
            if optimizer == "adam":
                v[name] = 0.99 * v[name] + 0.01 * update**2
            else:
                v[name] = v[name] - 0.01 * update**2 * np.sign(v[name] - update**2)
            x[name] = x[name] + 0.03 * m[name] / (np.sqrt(v[name]) + 2e-3)
        before = run.state.theta
        merge(run, given)
        near(named(run, run.state.theta), x)
        moved = [bool((run.state.theta != before)[run.model.branch(tower)].any()) for tower in TOWERS]
        assert moved == [silos == ALL, True]


# ------------------------------------------------------------------------------------------------- SCAFFOLD
def test_scaffolds_models_and_control_variates_are_those_of_algorithm_1_option_ii() -> None:
    run = federation("scaffold")
    x = named(run, run.state.theta)
    c = {name: 0 * each for name, each in x.items()}
    own = {i: {name: 0 * each for name, each in x.items()} for i in ALL}
    for silos in (ALL, (0, 1), ALL, (2, 3), ALL):  # in the first round silos with one modality have no prototype yet
        anchors, given = known(run), replies(run, silos)
        moved, changed = {name: list[Array]() for name in x}, {name: 0 * each for name, each in x.items()}
        for i in (i for i in silos if trains(i, anchors)):
            y, held = dict(x), [name for name in x if name.startswith(HELD[i])]
            for _ in range(STEPS):
                g = gradient(run, i, y, anchors)
                y |= {name: y[name] - RATE * (g[name] - own[i][name] + c[name]) for name in held}
            for name in held:
                new = own[i][name] - c[name] + (x[name] - y[name]) / (STEPS * RATE)
                changed[name] = changed[name] + new - own[i][name]
                own[i][name] = new
                moved[name].append(y[name] - x[name])
        merge(run, given)
        for name in x:  # three of four silos have each branch
            x[name] = x[name] + (np.mean(moved[name], axis=0) if moved[name] else 0)
            c[name] = c[name] + changed[name] / 3
        near(named(run, run.state.theta), x)
        near(named(run, run.state.tensors["control"]), c)
        for i in silos:
            near(named(run, run.personal[i][f"control.{run.version}"]), own[i])
    assert max(np.abs(each).max() for each in c.values()) > 1e-2


def test_scaffolds_c_is_the_mean_of_the_control_variates_although_replies_are_discarded_or_late() -> None:
    run = federation("scaffold")

    def mean() -> torch.Tensor:
        """The mean of the c_i that c counts, in each branch over the three silos that have it."""
        counted = run.state.tensors["counted"].tolist()
        kept = (run.personal.get(i, {}).get(f"control.{counted[i]}") for i in ALL)
        return sum((each for each in kept if each is not None), torch.zeros_like(run.state.theta)) / 3

    merge(run, replies(run, ALL))
    late, state, version = replies(run, (0,)), run.state, run.version
    replies(run, (3,))  # discarded
    merge(run, replies(run, (1, 2)))
    again = replies(run, (0,))  # before the reply to its task before is merged
    late = [replace(each, base_version=version, base=state, staleness=1) for each in late]
    merge(run, [*late, replace(again[0], base=run.state)])
    torch.testing.assert_close(run.state.tensors["control"], mean(), rtol=0, atol=1e-6)
    for silos in ((3,), ALL):
        merge(run, replies(run, silos))
        torch.testing.assert_close(run.state.tensors["control"], mean(), rtol=0, atol=1e-6)
    assert [len(run.personal[i]) for i in ALL] == [3, 2, 2, 2], "a reply of the first silo may still arrive"


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("privacy.clip_norm=1.0", "privacy.clip_norm"),
        ("compression.updates={kind: int8}", "compression.updates.kind"),
        ("privacy.secure_aggregation={}", "privacy.secure_aggregation"),
        ("aggregation.single_weight=0.5", "aggregation.single_weight"),
        ("protocol={name: scaffold, weighting: samples}", "protocol.weighting"),
    ],
)
def test_scaffold_refuses_what_its_control_variates_do_not_allow(
    tiny: Path, tmp_path: Path, setting: str, place: str
) -> None:
    with pytest.raises(InputError, match="uniform" if "weighting" in setting else "scaffold") as caught:
        in_process_run.run(resolved(tiny, "protocol=scaffold", setting), tmp_path)
    assert place in str(caught.value)


# ------------------------------------------------------------------------------------------------- FedNova
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_averages_updates_divided_by_the_weights_of_their_gradients(momentum: float) -> None:
    run = federation("fednova", momentum=momentum, batch_size=4)
    # 11 pairs are batches of 4, 4 and 3; 5 pairs are one batch, since a single pair has no contrast.
    steps = {0: 3 * STEPS, 1: 3 * STEPS, 2: 2 * STEPS, 3: STEPS}
    lengths = {i: sum((1 - momentum**k) / (1 - momentum) for k in range(1, n + 1)) for i, n in steps.items()}
    for silos in (ALL, ALL, (0, 2)):
        anchors, given, x = known(run), replies(run, silos), named(run, run.state.theta)
        for reply in given:
            values = [steps[reply.silo.index] * trains(reply.silo.index, anchors) * (tower in HELD[reply.silo.index])
                      for tower in TOWERS]  # fmt: skip
            assert payload_of(reply, LocalSteps).values.tolist() == [*values, 0]
        for name in x:
            active = [
                (SAMPLES[i], lengths[i], named(run, reply.delta)[name])
                for i, reply in zip(silos, given, strict=True)
                if trains(i, anchors) and name.startswith(HELD[i])
            ]
            total = sum(n for n, _, _ in active)
            effective = sum(n / total * length for n, length, _ in active)
            x[name] = x[name] + effective * sum(n / total * delta / length for n, length, delta in active)
        plain = run.state.theta + torch.cat([torch.from_numpy(d.ravel()) for d in weighted(run, given).values()])
        merge(run, given)
        near(named(run, run.state.theta), x)
        assert float((run.state.theta - plain).abs().max()) > 1e-3


def test_a_momentum_step_weighs_a_gradient_as_in_the_update() -> None:
    assert gradient_weight(0, 0.9) == 0
    position, velocity = 0.0, 0.0
    for count in range(1, 6):  # with all gradients 1 and rate 1 the update is the sum of their weights
        velocity = 0.5 * velocity + 1
        position += velocity
        assert gradient_weight(count, 0.5) == pytest.approx(position)
        assert gradient_weight(count, 0.0) == count


@pytest.mark.parametrize("name", ["fednova", "scaffold"])
def test_more_steps_than_the_silos_items_have_batches_are_refused(name: str) -> None:
    run = federation(name)
    (reply,) = replies(run, (0,))
    run.protocol.check(reply.payloads)
    lie = with_payload(reply, LocalSteps(np.array([2 * STEPS + 1, 0, 0])))
    with pytest.raises(RemoteWireError, match="7 local steps on 11 items, allowed: at most 6"):
        run.protocol.check(lie.payloads)


# ------------------------------------------------------------------------------------------------- Ditto
def test_dittos_personal_models_descend_their_loss_and_the_distance_to_the_downloaded_model() -> None:
    run, plain = federation("ditto", {"lambda_v": 0.7}), federation("fedavg")
    start = named(run, run.model.initial())
    v = dict.fromkeys(ALL, start)
    for silos in (ALL, (0, 1), ALL):
        anchors, w = known(run), named(run, run.state.theta)
        given = replies(run, silos)
        for i in (i for i in silos if trains(i, anchors)):
            for _ in range(STEPS):
                g = gradient(run, i, v[i], anchors)
                v[i] = {
                    name: each - RATE * (g[name] + 0.7 * (each - w[name])) if name in g else each
                    for name, each in v[i].items()
                }
        for i in (i for i in silos if OWN in run.personal[i]):
            near(named(run, run.personal[i][OWN]), v[i])
        assert {i for i in ALL if OWN in run.personal.get(i, {})} == {i for i in ALL if v[i] is not start}
        merge(run, given)
        merge(plain, replies(plain, silos))
        assert torch.equal(run.state.theta, plain.state.theta), "the global model is FedAvg's"


# ------------------------------------------------------------------------------------------------- FedRep
def test_fedreps_heads_are_fitted_to_the_downloaded_body_before_the_body_is_trained() -> None:
    run, heads = federation("fedrep", {"head_epochs": 4}), (".head.",)
    body = named(run, run.state.theta)
    own = {i: {name: each for name, each in body.items() if ".head." in name} for i in ALL}
    for silos in (ALL, (0, 2), ALL):
        anchors, given = known(run), replies(run, silos)
        updates = list[tuple[int, Parameters]]()
        for i in (i for i in silos if trains(i, anchors)):
            theta = {**body, **own[i]}
            for count, wanted in ((4, True), (STEPS, False)):
                for _ in range(count):
                    for name, slope in gradient(run, i, theta, anchors).items():
                        if any(part in name for part in heads) is wanted:
                            theta = {**theta, name: theta[name] - RATE * slope}
            own[i] = {name: theta[name] for name in own[i]}
            updates.append((i, {name: theta[name] - body[name] for name in body if name not in own[i]}))
        for i, reply in zip(silos, given, strict=True):
            assert not any(".head." in name for name in payload_of(reply, PartialDelta).names)
            kept = run.protocol.personal  # type: ignore[attr-defined]
            part = run.model.layout.part(kept).views(np.ascontiguousarray(run.personal[i][OWN].numpy()))
            near({name: each.astype(np.float64) for name, each in part.items()}, own[i])
        for name in body:
            active = [
                (SAMPLES[i], update[name]) for i, update in updates if name in update and name.startswith(HELD[i])
            ]
            total = sum(n for n, _ in active) or 1
            body[name] = body[name] + sum(n / total * update for n, update in active)
        merge(run, given)
        near(named(run, run.state.theta), {name: each for name, each in body.items() if ".head." not in name})


# ------------------------------------------------------------------------------------------------- whole runs
CRASH = "faults=[{kind: coordinator_crash, after_round: 2}, {kind: coordinator_crash, after_event: 7}]"


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("fedopt", "sync"),
        ("scaffold", "buffered"),
        ("fednova", "sync"),
        ("ditto", "sync"),
        ("fedrep", "sync"),
        ("ffalora", "buffered"),
        ("fedsalora", "sync"),
    ],
)
def test_a_run_that_was_killed_and_resumed_gives_the_same_models(
    tiny: Path, tmp_path: Path, name: str, mode: str
) -> None:
    settings = (f"protocol={name}", f"aggregation.mode={mode}", f"backbone.adapter={ADAPTERS.get(name, 'bottleneck')}")
    whole = in_process_run.run(resolved(tiny, *settings), tmp_path / "whole").summary
    killed = in_process_run.run_restarted(resolved(tiny, *settings, CRASH), tmp_path / "killed").summary
    assert whole is not None
    assert killed is not None
    found, wanted = killed.plain(), whole.plain()
    assert found["model_digest"] == wanted["model_digest"]
    assert found.get("personal") == wanted.get("personal")
