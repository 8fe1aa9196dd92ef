"""Properties of every method and objective; a new file in protocols/ is covered automatically."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import protocols
from coordinator.updates import check_reply
from fedmq.config.scenario import Objective, Training
from fedmq.errors import InputError, RemoteWireError, RunError
from fedmq.federation.protocol import Local, SiloFacts, State, Task, Update
from fedmq.wire.fields import FieldError
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Delta, PartialDelta, Payload, tensors
from protocols import objectives
from protocols.fedsalora import FedSaLora
from protocols.parts.aggregation import completed, inserted, shortened, updating
from protocols.parts.personal_model import OWN
from tests.replies import payload_of
from tests.small_federation import LABELS, MIXED, SmallFederation, equal_states, mixed, population

NAMES = protocols.names()
every_protocol = pytest.mark.parametrize("name", NAMES)
#: Methods whose silos send no update: personal models change instead of the coordinator's model.
NO_UPDATE = {"creamfl_public", "fedproto", "local"}


def update_of(payloads: tuple[Payload, ...]) -> Delta | PartialDelta | None:
    updates = [payload for payload in payloads if isinstance(payload, Delta | PartialDelta)]
    assert len(updates) <= 1
    return updates[0] if updates else None


def change_of(run: SmallFederation, reply: Update) -> torch.Tensor:
    """Change of a silo's model in its last task: the update it sent or, if it sends none, of its personal model."""
    update, layout = update_of(tuple(reply.payloads)), run.model.layout
    if update is None:
        return run.personal[reply.silo.index][OWN] - run.model.initial()
    names = update.names if isinstance(update, PartialDelta) else [entry.name for entry in layout.entries]
    return inserted(torch.zeros(layout.size), layout, names, torch.from_numpy(update.buffer.copy()))


def test_every_file_is_a_method_and_an_unknown_method_is_refused_with_the_known_ones() -> None:
    folder = Path(protocols.__file__).parent
    assert set(NAMES) == {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    for name in ("fedsgd", "_merge"):
        with pytest.raises(InputError, match=rf"protocol\.name.*'{name}'.*fedavg.*rcsr"):
            protocols.load(name)


@every_protocol
def test_a_method_describes_itself_and_refuses_wrong_options_by_name(name: str) -> None:
    line, kind = protocols.summary(name), protocols.load(name)
    assert 10 < len(line) < 150 and "\n" not in line
    options = protocols.options_of(kind, {})
    assert protocols.options_of(kind, json.loads(json.dumps(dataclasses.asdict(options)))) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options, dataclasses.fields(options)[0].name, None)
    with pytest.raises(InputError, match="no_such_option"):
        protocols.options_of(kind, {"no_such_option": 1})
    for option in dataclasses.fields(kind.Options):
        with pytest.raises(InputError) as caught:
            protocols.options_of(kind, {option.name: ["a", "list"]}, "x.yaml: protocol")
        assert caught.value.place == f"x.yaml: protocol.{option.name}"
        for value in (float("nan"), float("inf"), -1.0) if isinstance(option.default, float) else ():
            with pytest.raises(InputError, match=option.name):
                protocols.options_of(kind, {option.name: value})
    traits, before = population(name).protocol.traits(), kind.traits_of(options)
    assert (before.pooled, before.personal_only) == (traits.pooled, traits.personal_only)
    assert traits.pooled == (name == "central")
    assert traits.personalised or not traits.personal_only
    run = population(name)
    kinds = {kind for silo in run.eligible for kind in run.protocol.uploads(silo)}
    whole = traits.shared_layers in (None, tuple(entry.name for entry in run.context.layout.entries))
    usable = bool(kinds & {Delta, PartialDelta}) and whole
    assert traits.personal_only == (traits.personalised and not usable), "whether the shared model can be used"
    assert traits.our_reading == ("our reading" in line)


# ------------------------------------------------------------------------------------------------- whole rounds
@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No warning, and no use of a global generator."""
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


def sends(run: SmallFederation, update: Delta | PartialDelta | None, modality: str) -> bool:
    """Whether a reply contains parameters of a branch; where some layers are personal, it may not."""
    branch = run.model.branch(modality)
    names = update.names if isinstance(update, PartialDelta) else None
    parts = () if names is None else (part for name in names for part in run.model.layout.ranges([name]))
    return names is None or any(branch.start <= part.start < branch.stop for part in parts)


def on_the_way(run: SmallFederation, reply: Update) -> tuple[Payload, ...]:
    """A reply's payloads as sent over the wire."""
    return tuple(shortened(payload, run.model.layout, sender(run, reply)) for payload in reply.payloads)


def sender(run: SmallFederation, reply: Update) -> SiloFacts:
    """A reply's silo with the modalities whose branches it trains."""
    return updating(reply.silo, run.protocol.traits())


def assert_reply(run: SmallFederation, reply: Update) -> None:
    """The declared payloads; the branch of a missing modality is zero, is not sent, and all arrives to the bit."""
    kinds, update, change = [type(each) for each in reply.payloads], update_of(reply.payloads), change_of(run, reply)
    assert len(kinds) == len(set(kinds)) and frozenset(kinds) == run.protocol.uploads(reply.silo)
    for modality in ("image", "text"):
        part = change[run.model.branch(modality)]
        if not getattr(sender(run, reply), modality):
            assert not part.any()
        elif reply.silo.paired:
            assert part.any() or not sends(run, update, modality)
    torch.save(dict(run.personal[reply.silo.index]), io.BytesIO())
    sent = on_the_way(run, reply)
    short = update_of(sent)
    if isinstance(short, PartialDelta) and not sender(run, reply).paired:
        absent = "visual." if reply.silo.text else "text."
        assert not [layer for layer in short.names if layer.startswith(absent)]
        assert short.buffer.size == run.model.layout.part(short.names).size
    else:
        assert sender(run, reply).paired or update is None
    shared = run.protocol.traits().shared_layers
    for one, payload in zip(reply.payloads, sent, strict=True):
        other = completed(payload, run.model.layout, shared, sender(run, reply))
        assert type(one) is type(other) and vars(one).keys() == vars(other).keys()
        assert all(np.array_equal(value, vars(other)[key]) for key, value in vars(one).items())


def restored(state: State) -> State:
    """A state saved in a checkpoint and loaded."""
    loaded = load_tensors(save_tensors({"theta": state.theta, **state.tensors}))
    return State(loaded.pop("theta"), loaded, json.loads(json.dumps(dict(state.values))))


@every_protocol
def test_rounds_over_mixed_silos_keep_their_promises(name: str) -> None:
    run = population(name)
    start = run.state.theta.clone()
    for _ in range(3):
        with undisturbed():
            replies = run.replies()
            for reply in replies:
                for value in (value for payload in reply.payloads for value in vars(payload).values()):
                    if isinstance(value, np.ndarray):
                        value.setflags(write=False)  # as the wire's buffers
            before = restored(run.state)
            merged = run.protocol.merge(run.state, replies, run.version)
        for reply in replies:
            assert_reply(run, reply)
        assert equal_states(run.state, before), "a merge changes the state it is given"
        assert equal_states(run.protocol.merge(before, replies, run.version).state, merged.state)
        run.state, run.version = merged.state, run.version + 1
        assert all(np.isfinite(value) for value in merged.log.values())
        assert all(torch.isfinite(tensor).all() for tensor in (run.state.theta, *run.state.tensors.values()))
    moved = run.personal[0][OWN] if name in NO_UPDATE else run.state.theta
    assert moved.dtype == torch.float32 and torch.isfinite(moved).all() and not torch.equal(moved, start)
    assert_encoders(run)


def assert_encoders(run: SmallFederation) -> None:
    """A personalised method embeds with each silo's personal model, which differs from those of others."""
    images, captions = run.shares[0].image, run.shares[0].text
    assert images is not None and captions is not None
    embedded = []
    for silo in run.eligible if run.protocol.traits().personalised else ():
        local = Local(silo, run.shares[silo.index], run.model, run.personal[silo.index])
        encoders = run.protocol.encoders(local, run.protocol.task(run.state, silo))
        embedded.append(torch.stack([encoders.image(images), encoders.caption(captions[:, 0])]))
        assert embedded[-1].shape == (2, len(images), run.context.dim) and torch.isfinite(embedded[-1]).all()
    assert not embedded or not torch.equal(embedded[0], embedded[-1])


@every_protocol
def test_silos_with_a_single_sample_take_part_and_one_reply_can_be_merged(name: str) -> None:
    for kinds in (MIXED, ((True, True),), ((True, False), (False, True))):
        run = population(name, kinds=kinds, sizes=[1] * len(kinds))
        for silos in (run.eligible, *([silo] for silo in run.eligible), run.eligible):
            if silos:
                run.round(silos)
        assert all(torch.isfinite(tensor).all() for tensor in (run.state.theta, *run.state.tensors.values()))


@every_protocol
def test_items_without_a_pair_are_anchored_or_change_nothing(name: str) -> None:
    """A silo with both modalities may hold items with one; test_coordinator_unpaired_items.py has whole runs."""
    run = population(name)
    for _ in range(3):  # after FedBridge's warm-up
        run.round()
    anchors = run.protocol.traits().unpaired == "anchored"
    pairs, alone = mixed(run.eligible[0], 5, 4, 3)
    sent = []
    for image_only, text_only, unpaired in ((0, 0, ()), (4, 3, alone if anchors else ())):
        silo = dataclasses.replace(run.eligible[0], image_only=image_only, text_only=text_only)
        task = Task(4, 3, 3, 1e-3, run.protocol.task(run.state, silo))
        trained = run.protocol.train(Local(silo, pairs, run.model, {}, unpaired), task)
        assert np.isfinite(trained.loss)
        sent.append([tensor.tobytes() for payload in trained.payloads for tensor in tensors(payload)])
    assert (sent[0] != sent[1]) == anchors


@every_protocol
def test_training_repeats_to_the_bit_whichever_silo_used_the_model_before_and_never_sends_nan(name: str) -> None:
    runs = [population(name), population(name)]
    runs[1].train(runs[1].eligible[-1])
    runs[1].personal.clear()
    for one, other in zip(*(run.replies() for run in runs), strict=True):
        for first, second in zip(one.payloads, other.payloads, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))
        kept = [run.personal[one.silo.index] for run in runs]
        assert kept[0].keys() == kept[1].keys()
        assert all(torch.equal(kept[0][key], kept[1][key]) for key in kept[0])
    run, spoilt = runs[0], torch.full_like(runs[0].state.theta, float("nan"))
    run.model.load(spoilt)
    run.state = dataclasses.replace(run.state, theta=spoilt)
    run.personal[0] = {OWN: spoilt} if name in NO_UPDATE else {}
    with pytest.raises(RunError, match=r"silo-00.*learning_rate"):
        run.train(run.eligible[0])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_UPDATE | {"central"}])
def test_a_damped_reply_is_weighted_less(name: str) -> None:
    run = population(name, kinds=((True, True), (True, True)), sizes=(8, 8))
    replies = run.replies()
    first, rest = (change_of(run, reply) for reply in replies)

    def share_of_first(damping: float) -> float:
        given = [dataclasses.replace(replies[0], damping=damping), replies[1]]
        step = run.protocol.merge(run.state, given, 0).state.theta - run.state.theta
        return float((step - rest).dot(first - rest) / (first - rest).square().sum())

    assert share_of_first(0.5) < share_of_first(1.0) - 0.05


# ------------------------------------------------------------------------------------------------- refusals
def check(run: SmallFederation, reply: Update, sent: tuple[Payload, ...], samples: int | None = None) -> None:
    """Check payloads of a silo as the coordinator does when they arrive."""
    header = Header(
        run="run", kind=Kind.REPLY, sender=reply.silo.name, receiver="coordinator", sequence=1, sent_at=0.0,
        reply_to=1, base_version=1,
    )  # fmt: skip
    uploads, shared = run.protocol.uploads(reply.silo), run.protocol.traits().shared_layers
    check_reply(Message(header, sent), uploads, run.context, sender(run, reply), shared, samples=samples)
    run.protocol.check(sent)


def broken(run: SmallFederation, payload: Payload) -> Iterator[Payload]:
    """The payload with an extra row or column, and an update of other values and layers, if it can be constructed."""
    arrays = {name: value for name, value in vars(payload).items() if isinstance(value, np.ndarray) and value.ndim}
    longest = max((len(value) for value in arrays.values()), default=0)
    changes: list[dict[str, Any]] = [
        {k: np.concatenate([v, v[:1]]) for k, v in arrays.items() if len(v) == longest},
        {k: np.concatenate([v, v[:, :1]], axis=1) for k, v in arrays.items() if v.ndim > 1},
    ]
    if isinstance(payload, Delta | PartialDelta):
        changes += [{"buffer": payload.buffer[:-1].copy()}, {"layout_digest": "0" * 64}, {"n_samples": 0}]
    if isinstance(payload, PartialDelta):
        first = run.model.layout.by_name[payload.names[0]].size
        changes += [{"names": (*payload.names[:-1], "no.such.layer")}]
        if not isinstance(run.protocol, FedSaLora) or len(payload.names) > 1:  # whose silos share one factor only
            assert len(payload.names) > 1
            changes += [
                {"names": payload.names[1:], "buffer": payload.buffer[first:].copy()},
                {"names": payload.names[::-1]},
            ]
    for changed in filter(None, changes):
        with contextlib.suppress(FieldError, RemoteWireError, ValueError):
            yield dataclasses.replace(payload, **changed)


@every_protocol
def test_a_reply_of_another_shape_or_of_other_layers_is_refused_before_the_merge(name: str) -> None:
    run = population(name)
    run.round()
    tried = 0
    for reply in run.replies():
        sent = on_the_way(run, reply)
        check(run, reply, sent)
        for place, payload in enumerate(sent):
            for other in broken(run, payload):
                tried += 1
                with pytest.raises(RemoteWireError):
                    check(run, reply, (*sent[:place], other, *sent[place + 1 :]))
    assert tried or name == "local"  # which sends a loss, a number


def test_an_update_of_more_samples_than_the_silo_has_is_refused() -> None:
    run = population("fedavg", kinds=[(True, True)] * 2)
    for reply in run.replies():
        held = len(run.shares[reply.silo.index])
        check(run, reply, reply.payloads, samples=held)
        with pytest.raises(RemoteWireError, match=rf"{held} samples, the silo has {held - 1}"):
            check(run, reply, reply.payloads, samples=held - 1)


#: Runs that a method refuses: options, objective, labels, and the place that the error names.
DCMH, DSCMR, NO_LABELS = Objective(base="dcmh", bits=8, hidden=16), Objective(base="dscmr", bits=8, hidden=16), ()
REFUSED = [
    ("rcsr", {}, DCMH, LABELS, "objective.base"),
    ("fedbridge", {}, DCMH, LABELS, "objective.base"),
    ("creamfl_public", {}, DCMH, LABELS, "objective.base"),
    ("carmfl", {}, DCMH, LABELS, "objective.base"),
    ("fedcola", {}, DCMH, LABELS, "objective.base"),
    ("pmcmfl", {}, DCMH, LABELS, "objective.base"),
    ("pmcmfl", {}, None, NO_LABELS, "protocol.name"),
    ("plfedcmh", {}, Objective(), LABELS, "objective.base"),
    ("fedcafe", {}, Objective(), LABELS, "objective.base"),
    ("fedcmr", {}, Objective(), LABELS, "objective.base"),
    ("feduch", {}, DCMH, LABELS, "objective.base"),
    ("feduch", {}, Objective(base="shdch", bits=8), LABELS, "objective.base"),
    ("fedscmr", {}, DSCMR, LABELS, "objective"),
    ("fedscmr", {"shared_layers": "all", "eval_space": "common"}, None, LABELS, "protocol.eval_space"),
    ("fedper", {"personal_layers": "audio."}, None, LABELS, "protocol.personal_layers"),
    ("fedper", {"personal_layers": "visual.,text."}, None, LABELS, "protocol.personal_layers"),
    ("rcsr", {"fair_eta": 6.0, "fair_tau": 0.5}, None, LABELS, "protocol.fair_eta times fair_tau"),
    ("fedproto", {}, None, NO_LABELS, "protocol.name"),
    ("fedhap", {}, None, NO_LABELS, "protocol.name"),
    ("plfedcmh", {}, None, NO_LABELS, "objective.base"),
]


def test_a_run_that_a_method_is_not_defined_for_is_refused_in_one_line() -> None:
    for name, options, objective, labels, place in REFUSED:
        with pytest.raises(InputError) as caught:
            population(name, options, objective=objective, labels=labels)
        assert caught.value.place == place, name
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------- FedAvg and switches
HASHED = {
    base: Objective.model_validate({"base": base, "bits": 8, "hidden": 16})
    for base in ("dcmh", "shdch", "dscmr", "triplet", "csq", "dgcpn", "djsrh")
}
CAFE = {"afe": False, "loss_e": False, "loss_c": False, "loss_d": False, "weighted_agg": False}
RCSR = {"router": False, "minimax": False, "client_align": False, "anchor": False, "lambda_s": 0.0}
SCMR = {"loss_cs": False, "loss_ccs": False, "agg": "samples", "shared_layers": "all", "validation": 0.0}
FEDPROX, MFCPL = {"mu": 0.0}, {"cmpr": 0.0, "cmpc": 0.0, "cma": 0.0}
CREAMFL, HAP = {"inter": 0.0, "intra": 0.0, "kd": 0.0}, {"proto_triplet": False, "discriminator": False}
UCH, IDLE, PRINTED = {"contrast": False, "distill": False}, {"single_modality": "idle"}, {"branch_renorm": False}
ENHANCED = Objective(base="dscmr", bits=8, hidden=16, enhance=True, alpha=0.0, beta=0.0)
#: A method, its options without effect, the objective, and FedAvg's options.
DEGENERATE: list[tuple[str, dict[str, Any], Objective | None, dict[str, Any]]] = [
    *(("fedprox", FEDPROX, HASHED.get(base), {}) for base in ("", "dscmr")),
    *(("moon", FEDPROX, HASHED.get(base), {}) for base in ("", "dscmr")),
    *(("fedmekt", {"weight": 0.0}, HASHED.get(base), {}) for base in ("", "dscmr")),
    *(("mfcpl", MFCPL, HASHED.get(base), {}) for base in ("", "dscmr")),
    *(("creamfl", CREAMFL, HASHED.get(base), {}) for base in ("", "dscmr")),
    *(("feduch", UCH, HASHED.get(base), {}) for base in ("", "dgcpn", "djsrh")),
    *(("fedhap", HAP, HASHED[base], {"weighting": "uniform"}) for base in ("triplet", "csq")),
    ("fedcafe", CAFE, HASHED["dcmh"], {}),
    ("fedcafe", {**CAFE, **PRINTED}, HASHED["shdch"], PRINTED),
    ("rcsr", RCSR, None, IDLE),
    ("rcsr", {**RCSR, **PRINTED}, None, {**IDLE, **PRINTED}),
    ("rcsr", {**RCSR, "anchor": True}, None, {}),
    ("rcsr", {**RCSR, "anchor": True, "proto_unit": False}, None, {"proto_unit": False}),
    ("fedscmr", SCMR, ENHANCED, {}),
]


@pytest.mark.parametrize(("name", "off", "objective", "plain"), DEGENERATE)
def test_with_its_switches_off_a_method_equals_fedavg_to_the_bit_and_with_its_defaults_it_does_not(
    name: str, off: dict[str, Any], objective: Objective | None, plain: dict[str, Any]
) -> None:
    fedavg, degenerate = population("fedavg", plain, objective=objective), population(name, off, objective=objective)
    whole = population(name, {"warmup": 1} if name == "rcsr" else {}, objective=objective)
    for _ in range(4):
        for run in (fedavg, degenerate, whole):
            run.round()
        assert torch.equal(degenerate.state.theta, fedavg.state.theta)
        if "prototypes" in fedavg.state.tensors:
            assert torch.equal(degenerate.state.tensors["prototypes"], fedavg.state.tensors["prototypes"])
    assert degenerate.personal.keys() == fedavg.personal.keys()
    assert torch.isfinite(whole.state.theta).all() and not torch.equal(whole.state.theta, fedavg.state.theta)


#: A method, its objective, common options, and changes that must each have an effect.
SWITCHES: list[tuple[str, Objective | None, dict[str, Any], list[dict[str, Any]]]] = [
    (
        "fedcafe",
        None,
        {},
        [
            *({switch: False} for switch in CAFE),
            {"kl": "code"},
            {"kl": "printed"},
            {"le_detach": True},
            {"memory": "class_mean"},
            {"memory": "kmeans_random"},
            {"memory": "kmeans_two_stage"},
            {"similarity": "cluster"},
            {"weight": "softmax"},
            {"branch_renorm": "conflict_free"},
        ],
    ),
    (
        "rcsr",
        None,
        {"warmup": 1},
        [
            *({switch: False} for switch in ("router", "minimax", "client_align", "anchor", "branch_renorm")),
            {"eq9_half": True, "router_softplus": True, "beta4": 0.1, "fair_update": "code", "ema": 0.95, "warmup": 0},
            {"fair_update": "paper", "fair_center": False, "masked_ema": False, "proto_unit": False},
            {"anchor": "multi", "anchor_centroids": 3, "anchor_support": 2},
            {"branch_renorm": "conflict_free"},
            *({"router_mask": "none", "filler": filler, "masked_pc": False} for filler in ("ema", "zero", "learned")),
        ],
    ),
    ("feduch", HASHED["dgcpn"], {}, [{"contrast": False}, {"distill": False}]),
    (
        "fedhap",
        HASHED["triplet"],
        {},
        [*({switch: False} for switch in HAP), {"adv_input": "relaxed"}, {"adv_g": "literal"}, {"eq8": "printed"}],
    ),
    ("plfedcmh", None, {"hn_rate": 0.01}, [{"beta": 0.0}, {"eta": 0.0}, {"hn_rate": 0.0}, {"hn_sign": "code"}]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "objective", "common", "changes"), SWITCHES, ids=lambda value: str(value)[:12])
def test_every_switch_of_a_method_changes_the_result(
    name: str, objective: Objective | None, common: dict[str, Any], changes: list[dict[str, Any]]
) -> None:
    runs = [population(name, {**common, **change}, objective=objective) for change in ({}, *changes)]
    for run in runs:
        for _ in range(4):
            run.round()
        assert torch.isfinite(run.state.theta).all()
    for change, run in zip(changes, runs[1:], strict=True):
        assert not equal_states(run.state, runs[0].state), change


# ---------------------------------------------------------------------------------------------------- every objective
BASES = protocols.losses()
UNSUPERVISED = {"dgcpn", "djsrh", "jdsh"}
ADAM = Training(optimizer="adam", batch_size=30, local_epochs=2, weight_decay=0.0)
LONE = ((True, True), (True, False), (False, True))


def small(base: str, name: str = "fedavg", **changes: Any) -> SmallFederation:
    objective = Objective.model_validate({"base": base, "bits": 8, "hidden": 16})
    return population(name, objective=objective, **changes)


def deltas(run: SmallFederation) -> list[np.ndarray]:
    return [payload_of(reply, Delta).buffer for reply in run.replies()]


@pytest.mark.parametrize("base", BASES)
def test_a_base_trains_exactly_the_branches_that_a_silo_has_even_on_one_item(base: str) -> None:
    for sizes in ([11, 9, 7], [1, 1, 1]):
        run = small(base, kinds=LONE, sizes=sizes, training=Training(optimizer="adam", batch_size=4))
        for _ in range(2):
            replies: list[Update] = run.replies()
            for reply in replies:
                delta = payload_of(reply, Delta).buffer
                for modality in ("image", "text"):
                    trains = bool(delta[run.model.branch(modality)].any())
                    assert trains == getattr(reply.silo, modality) or (sizes[0] == 1 and not trains), modality
            run.state, run.version = run.protocol.merge(run.state, replies, run.version).state, run.version + 1
        assert torch.isfinite(run.state.theta).all()


@pytest.mark.parametrize("base", BASES)
def test_a_base_needs_labels_or_ignores_them(base: str) -> None:
    run, blind = small(base), small(base)
    blind.shares = {index: replace(share, labels=None) for index, share in blind.shares.items()}
    if base in UNSUPERVISED:
        assert all(np.array_equal(one, other) for one, other in zip(deltas(run), deltas(blind), strict=True))
    else:
        with pytest.raises(InputError, match="labels"):
            blind.replies()


@pytest.mark.parametrize("base", BASES)
def test_a_base_lowers_its_loss(base: str) -> None:
    run = small(base, kinds=((True, True),), sizes=[60], training=ADAM)
    (silo,) = run.context.silos
    losses = []
    for _ in range(20):
        trained = run.train(silo, 3e-3)
        losses.append(trained.loss)
        run.state = run.protocol.merge(run.state, [run.reply(silo, trained)], run.version).state
        run.version += 1
    assert losses[-1] < (1 if base in UNSUPERVISED else 0.95) * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_general_methods_run_on_every_base(base: str) -> None:
    plain = small(base)
    for name in ("central", "fedprox", "local", "scaffold", "ditto", "fedrep", "moon"):
        run = small(base, name)
        for _ in range(3):
            run.round()
        for reply in run.replies():
            run.protocol.check(reply.payloads)
        moved = run.personal[0][OWN] if name == "local" else run.state.theta
        assert torch.isfinite(moved).all() and not torch.equal(moved, run.model.initial())
    for _ in range(3):
        plain.round()
    apart = (run.state.theta - plain.state.theta).abs()
    for modality in ("image", "text"):  # MOON contrasts both towers
        assert float(apart[run.model.branch(modality)].max()) > 1e-5, modality


@pytest.mark.parametrize(
    ("base", "option"), [("dgcpn", "a1"), ("dgcpn", "coexistence"), ("dgcpn", "no_such_option"), ("dsph", "zeta")]
)
def test_a_base_refuses_an_option_that_is_not_allowed(base: str, option: str) -> None:
    with pytest.raises(InputError, match=option):
        objectives.options_of(Objective(base=base, **{option: -2.0}))


def test_a_base_without_options_names_the_key_that_it_refuses_and_how_a_base_is_chosen() -> None:
    with pytest.raises(InputError, match=r"objective: found 'name', allowed: base; info_nce has no options"):
        objectives.options_of(Objective.model_validate({"name": "dscmr"}))
