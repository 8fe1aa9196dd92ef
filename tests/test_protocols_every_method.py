"""Properties of every federated method; a new file in protocols/ is covered automatically."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import protocols
from coordinator.updates import check_reply
from fedmq.config.scenario import Objective
from fedmq.errors import InputError, RemoteWireError, RunError
from fedmq.federation.protocol import Local, State, Task, Update
from fedmq.wire.fields import FieldError
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Delta, PartialDelta, Payload, tensors
from protocols.parts.aggregation import inserted, places
from protocols.parts.missing_branch import completed, shortened
from protocols.parts.personal_model import OWN
from tests.small_federation import LABELS, MIXED, SmallFederation, equal_states, mixed, population

NAMES = protocols.names()
every_protocol = pytest.mark.parametrize("name", NAMES)


#: Methods whose silos send no update: personal models change instead of the coordinator's model.
NO_UPDATE = {"creamfl_public", "fedproto", "local"}
updating_protocol = pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_UPDATE])


def delta_of(reply: Update) -> Delta | PartialDelta:
    (delta,) = [payload for payload in reply.payloads if isinstance(payload, Delta | PartialDelta)]
    return delta


def change_of(run: SmallFederation, reply: Update) -> torch.Tensor:
    """Change of a silo's model in its last task: the update it sent or, if it sends none, of its personal model."""
    if OWN in run.personal[reply.silo.index] and type(run.protocol).__module__.rpartition(".")[2] in NO_UPDATE:
        return run.personal[reply.silo.index][OWN] - run.model.initial()
    delta, layout = delta_of(reply), run.model.layout
    buffer = torch.from_numpy(delta.buffer.copy())
    names = delta.names if isinstance(delta, PartialDelta) else [entry.name for entry in layout.entries]
    return inserted(torch.zeros(layout.size), layout, names, buffer)


def test_every_file_without_underscore_is_a_method() -> None:
    folder = Path(protocols.__file__).parent
    assert set(NAMES) == {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert {"fedavg", "paired_only", "rcsr"} <= set(NAMES)


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"protocol\.name.*'fedsgd'.*fedavg.*rcsr"):
        protocols.load("fedsgd")
    with pytest.raises(InputError):
        protocols.load("_merge")


def sends(run: SmallFederation, reply: Update, modality: str) -> bool:
    """Whether a reply contains parameters of a branch; where some layers are personal, it may not."""
    names = next((payload.names for payload in reply.payloads if isinstance(payload, PartialDelta)), None)
    branch = run.model.branch(modality)
    return names is None or any(branch.start <= part.start < branch.stop for part in places(run.model.layout, names))


@every_protocol
def test_a_method_describes_itself_in_one_line(name: str) -> None:
    line = protocols.summary(name)
    assert 10 < len(line) < 150
    assert "\n" not in line


@every_protocol
def test_traits_of_a_method_are_known_before_a_run_begins(name: str) -> None:
    run = population(name)
    before, traits = type(run.protocol).traits_of(protocols.options_of(protocols.load(name), {})), run.protocol.traits()
    assert (before.pooled, before.personal_only) == (traits.pooled, traits.personal_only)
    assert traits.pooled == (name == "central")
    assert traits.personalised or not traits.personal_only


@every_protocol
def test_a_personalised_method_embeds_with_each_silos_personal_model(name: str) -> None:
    run = population(name)
    run.round()
    if not run.protocol.traits().personalised:
        return
    for silo in run.eligible:
        local = Local(silo, run.shares[silo.index], run.model, run.personal[silo.index])
        encoders = run.protocol.encoders(local, run.protocol.task(run.state, silo))
        images, captions = run.shares[0].image, run.shares[0].text
        assert images is not None
        assert captions is not None
        for found in (encoders.image(images), encoders.caption(captions[:, 0])):
            assert found.shape == (len(images), run.context.dim)
            assert torch.isfinite(found).all()


@every_protocol
def test_default_options_round_trip_through_plain_data(name: str) -> None:
    kind = protocols.load(name)
    options = protocols.options_of(kind, {})
    assert protocols.options_of(kind, json.loads(json.dumps(dataclasses.asdict(options)))) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options, dataclasses.fields(options)[0].name, None)


@every_protocol
def test_an_unknown_option_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError) as caught:
        protocols.options_of(protocols.load(name), {"no_such_option": 1}, "x.yaml: protocol")
    assert "no_such_option" in str(caught.value)
    assert "\n" not in str(caught.value)


@every_protocol
def test_an_option_of_the_wrong_type_is_refused_by_name(name: str) -> None:
    kind = protocols.load(name)
    for each in dataclasses.fields(kind.Options):
        with pytest.raises(InputError) as caught:
            protocols.options_of(kind, {each.name: ["a", "list"]}, "x.yaml: protocol")
        assert caught.value.place == f"x.yaml: protocol.{each.name}"


@every_protocol
def test_numbers_that_are_not_finite_are_refused(name: str) -> None:
    kind = protocols.load(name)
    for each in dataclasses.fields(kind.Options):
        if each.type in ("float", float):
            for value in (float("nan"), float("inf"), -1.0):
                with pytest.raises(InputError, match=each.name):
                    protocols.options_of(kind, {each.name: value})


@every_protocol
def test_three_rounds_over_mixed_silos_change_the_model_and_stay_finite(name: str) -> None:
    run = population(name)
    start = run.state.theta.clone()
    for _ in range(3):
        log = run.round()
        assert all(np.isfinite(value) for value in log.values())
    moved = run.personal[0][OWN] if name in NO_UPDATE else run.state.theta
    assert moved.dtype == torch.float32
    assert torch.isfinite(moved).all()
    assert not torch.equal(moved, start)
    for tensor in run.state.tensors.values():
        assert torch.isfinite(tensor).all()


@every_protocol
def test_the_branch_of_a_missing_modality_is_exactly_zero_in_the_update(name: str) -> None:
    run = population(name)
    for _ in range(2):
        for reply in (replies := run.replies()):
            change = change_of(run, reply)
            for modality in ("image", "text"):
                part = change[run.model.branch(modality)]
                if not getattr(reply.silo, modality):
                    assert not part.any()
                elif reply.silo.paired:
                    assert part.any() or not sends(run, reply, modality)
        run.state = run.protocol.merge(run.state, replies, run.version).state
        run.version += 1


@every_protocol
def test_items_without_a_pair_are_anchored_or_change_nothing(name: str) -> None:
    """A silo with both modalities may hold items with one; test_coordinator_unpaired_items.py has whole runs."""
    run = population(name)
    for _ in range(3):  # after FedBridge's warm-up
        run.round()
    anchors = run.protocol.traits().unpaired == "anchored"
    pairs, alone = mixed(run.eligible[0], 5, 4, 3)
    found = []
    for image_only, text_only, unpaired in ((0, 0, ()), (4, 3, alone if anchors else ())):
        silo = dataclasses.replace(run.eligible[0], image_only=image_only, text_only=text_only)
        task = Task(4, 3, 3, 1e-3, run.protocol.task(run.state, silo))
        trained = run.protocol.train(Local(silo, pairs, run.model, {}, unpaired), task)
        assert np.isfinite(trained.loss)
        found.append([each.tobytes() for payload in trained.payloads for each in tensors(payload)])
    assert (found[0] != found[1]) == anchors


def shared_layers(run: SmallFederation) -> tuple[str, ...] | None:
    return run.protocol.traits().shared_layers


def on_the_way(run: SmallFederation, reply: Update) -> tuple[Payload, ...]:
    """A reply's payloads as sent over the wire."""
    return tuple(shortened(payload, run.model.layout, reply.silo) for payload in reply.payloads)


def check(run: SmallFederation, reply: Update, sent: tuple[Payload, ...], samples: int | None = None) -> None:
    """Check payloads of a silo as the coordinator does when they arrive."""
    header = Header(
        run="run", kind=Kind.REPLY, sender=reply.silo.name, receiver="coordinator", sequence=1, sent_at=0.0,
        reply_to=1, base_version=1,
    )  # fmt: skip
    uploads = run.protocol.uploads(reply.silo)
    check_reply(Message(header, sent), uploads, run.context, reply.silo, shared_layers(run), samples=samples)
    run.protocol.check(sent)


@updating_protocol
def test_the_branch_of_a_missing_modality_is_not_sent_and_the_rest_arrives_to_the_bit(name: str) -> None:
    run = population(name)
    run.round()
    for reply in run.replies():
        sent = on_the_way(run, reply)
        (update,) = [payload for payload in sent if isinstance(payload, Delta | PartialDelta)]
        if isinstance(update, PartialDelta) and not reply.silo.paired:
            absent = "visual." if reply.silo.text else "text."
            assert not [layer for layer in update.names if layer.startswith(absent)]
            assert update.buffer.size == run.model.layout.part(update.names).size
        else:
            assert reply.silo.paired
        arrived = [completed(payload, run.model.layout, shared_layers(run), reply.silo) for payload in sent]
        for one, other in zip(reply.payloads, arrived, strict=True):
            assert type(one) is type(other)
            assert vars(one).keys() == vars(other).keys()
            for key, value in vars(one).items():
                assert np.array_equal(value, vars(other)[key])


@updating_protocol
def test_an_update_of_other_layers_is_refused(name: str) -> None:
    run = population(name)
    for reply in run.replies():
        sent = on_the_way(run, reply)
        (update,) = [payload for payload in sent if isinstance(payload, Delta | PartialDelta)]
        if not isinstance(update, PartialDelta):
            continue
        first = run.model.layout.by_name[update.names[0]].size
        others = [
            dataclasses.replace(update, names=update.names[1:], buffer=update.buffer[first:].copy()),
            dataclasses.replace(update, names=update.names[::-1]),
            dataclasses.replace(update, names=(*update.names[:-1], "no.such.layer")),
        ]
        assert len(update.names) > 1
        for other in others:
            payloads = tuple(other if payload is update else payload for payload in sent)
            with pytest.raises(RemoteWireError, match="layers"):
                check(run, reply, payloads)


@every_protocol
def test_replies_contain_the_payload_kinds_that_uploads_declares(name: str) -> None:
    run = population(name)
    for reply in run.replies():
        kinds = [type(payload) for payload in reply.payloads]
        assert len(kinds) == len(set(kinds))
        assert frozenset(kinds) == run.protocol.uploads(reply.silo)


@every_protocol
def test_a_merge_changes_nothing_in_the_state_it_is_given(name: str) -> None:
    run = population(name)
    run.round()
    before = State(
        run.state.theta.clone(),
        {key: value.clone() for key, value in run.state.tensors.items()},
        dict(run.state.values),
    )
    run.protocol.merge(run.state, run.replies(), 1)
    assert equal_states(run.state, before)


@every_protocol
def test_a_merge_of_one_reply_is_possible(name: str) -> None:
    run = population(name)
    for silo in run.eligible:
        merged = run.protocol.merge(run.state, run.replies([silo]), 0)
        assert torch.isfinite(merged.state.theta).all()


@updating_protocol
def test_a_broken_update_is_refused_before_a_merge(name: str) -> None:
    run = population(name)
    good = next(reply for reply in run.replies() if reply.silo.paired)
    delta = delta_of(good)
    check(run, good, good.payloads)
    for change in ({"buffer": delta.buffer[:-1].copy()}, {"layout_digest": "0" * 64}, {"n_samples": 0}):
        broken = dataclasses.replace(delta, **change)
        with pytest.raises(RemoteWireError):
            check(run, good, tuple(broken if payload is delta else payload for payload in good.payloads))


@every_protocol
def test_training_is_the_same_to_the_bit_whichever_silo_used_the_model_before(name: str) -> None:
    runs = [population(name), population(name)]
    runs[1].train(runs[1].eligible[-1])
    runs[1].personal.clear()
    for one, other in zip(*(run.replies() for run in runs), strict=True):
        for first, second in zip(one.payloads, other.payloads, strict=True):
            for a, b in zip(tensors(first), tensors(second), strict=True):
                assert np.array_equal(a, b)
        kept = [run.personal[one.silo.index] for run in runs]
        assert kept[0].keys() == kept[1].keys()
        assert all(torch.equal(kept[0][key], kept[1][key]) for key in kept[0])


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


@every_protocol
def test_a_state_survives_a_checkpoint_to_the_bit(name: str) -> None:
    run = population(name)
    run.round()
    raw = save_tensors({"theta": run.state.theta, **run.state.tensors})
    values = json.loads(json.dumps(dict(run.state.values)))
    tensors = load_tensors(raw)
    restored = State(tensors.pop("theta"), tensors, values)
    assert equal_states(run.state, restored)
    replies = run.replies()
    assert equal_states(run.protocol.merge(run.state, replies, 1).state, run.protocol.merge(restored, replies, 1).state)


@every_protocol
@pytest.mark.parametrize(
    "kinds", [MIXED, ((True, True),), ((True, False), (False, True))], ids=["mixed", "one", "none paired"]
)
def test_silos_with_a_single_sample_take_part(name: str, kinds: tuple[tuple[bool, bool], ...]) -> None:
    run = population(name, kinds=kinds, sizes=[1] * len(kinds))
    for _ in range(2):
        if run.eligible:
            run.round()
    assert torch.isfinite(run.state.theta).all()
    for tensor in run.state.tensors.values():
        assert torch.isfinite(tensor).all()


@every_protocol
def test_read_only_buffers_from_the_wire_raise_no_warning(name: str) -> None:
    run = population(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.round()
        replies = run.replies()
        for reply in replies:
            for payload in reply.payloads:
                for value in vars(payload).values():
                    if isinstance(value, np.ndarray):
                        value.setflags(write=False)
        run.protocol.merge(run.state, replies, 1)


@every_protocol
def test_no_global_generator_is_used(name: str) -> None:
    run = population(name)
    run.round()
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    run.round()
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


@every_protocol
def test_personal_tensors_can_be_saved(name: str) -> None:
    run = population(name)
    for silo in run.eligible:
        state = run.train(silo).state
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)


@every_protocol
def test_diverging_training_raises_an_error_instead_of_sending_nan(name: str) -> None:
    run = population(name)
    spoilt = torch.full_like(run.state.theta, float("nan"))
    run.model.load(spoilt)
    run.state = dataclasses.replace(run.state, theta=spoilt)
    if name in NO_UPDATE:
        run.personal[0] = {OWN: spoilt}
    with pytest.raises(RunError, match=r"silo-00.*learning_rate"):
        run.train(run.eligible[0])


def misshapen(payload: Payload) -> list[Payload]:
    """The payload with an extra row and an extra column, where such a payload can be constructed."""
    arrays = {name: value for name, value in vars(payload).items() if isinstance(value, np.ndarray) and value.ndim}
    longest = max((len(value) for value in arrays.values()), default=0)
    rows = {k: np.concatenate([v, v[:1]]) for k, v in arrays.items() if len(v) == longest}
    columns = {k: np.concatenate([v, v[:, :1]], axis=1) for k, v in arrays.items() if v.ndim > 1}
    found = []
    for changed in (rows, columns):
        with contextlib.suppress(FieldError, RemoteWireError, ValueError):
            found += [dataclasses.replace(payload, **changed)] if changed else []
    return found


@every_protocol
def test_a_reply_of_another_shape_is_refused_before_the_merge(name: str) -> None:
    run = population(name)
    run.round()
    tried = 0
    for reply in run.replies():
        sent = on_the_way(run, reply)
        check(run, reply, sent)
        for place, payload in enumerate(sent):
            for other in misshapen(payload):
                payloads = (*sent[:place], other, *sent[place + 1 :])
                tried += 1
                with pytest.raises(RemoteWireError):
                    check(run, reply, payloads)
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


@pytest.mark.parametrize(("name", "options", "objective", "labels", "place"), REFUSED)
def test_a_run_that_a_method_is_not_defined_for_is_refused_in_one_line(
    name: str, options: dict[str, object], objective: Objective | None, labels: tuple[str, ...], place: str
) -> None:
    with pytest.raises(InputError) as caught:
        population(name, options, objective=objective, labels=labels)
    assert caught.value.place == place
    assert "\n" not in str(caught.value)
