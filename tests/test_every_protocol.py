"""What holds for every federated method; a new file in protocols/ is covered without a line here."""

from __future__ import annotations

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
from fedmq.errors import FedmqError, InputError, RunError
from fedmq.messages import Delta
from fedmq.protocol import Reply, State
from tests.protocol_world import MIXED, equal_states, world

NAMES = protocols.names()
every_protocol = pytest.mark.parametrize("name", NAMES)


def delta_of(reply: Reply) -> Delta:
    (delta,) = [payload for payload in reply.payloads if isinstance(payload, Delta)]
    return delta


def test_every_file_without_underscore_is_a_method() -> None:
    folder = Path(protocols.__file__).parent
    assert set(NAMES) == {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert {"fedavg", "paired_only", "rcsr"} <= set(NAMES)


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"protocol\.name.*'fedsgd'.*fedavg.*rcsr"):
        protocols.load("fedsgd")
    with pytest.raises(InputError):
        protocols.load("_merge")


@every_protocol
def test_a_method_describes_itself_in_one_line(name: str) -> None:
    line = protocols.summary(name)
    assert 10 < len(line) < 150
    assert "\n" not in line


@every_protocol
def test_default_options_survive_a_round_trip_through_plain_data(name: str) -> None:
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
def test_an_option_of_the_wrong_type_is_refused_by_its_name(name: str) -> None:
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
def test_three_rounds_over_mixed_silos_move_the_model_and_stay_finite(name: str) -> None:
    run = world(name)
    start = run.state.theta.clone()
    for _ in range(3):
        log = run.round()
        assert all(np.isfinite(value) for value in log.values())
    assert run.state.theta.dtype == torch.float32
    assert torch.isfinite(run.state.theta).all()
    assert not torch.equal(run.state.theta, start)
    for tensor in run.state.tensors.values():
        assert torch.isfinite(tensor).all()


@every_protocol
def test_the_branch_of_a_missing_modality_is_exactly_zero_in_the_update(name: str) -> None:
    run = world(name)
    for _ in range(2):
        for reply in (replies := run.replies()):
            buffer = delta_of(reply).buffer
            for modality in ("image", "text"):
                part = buffer[run.model.branch(modality)]
                if not getattr(reply.silo, modality):
                    assert not part.any()
                elif reply.silo.paired:
                    assert part.any()
        run.state = run.protocol.merge(run.state, replies, run.version).state
        run.version += 1


@every_protocol
def test_what_comes_up_is_what_uploads_says(name: str) -> None:
    run = world(name)
    for reply in run.replies():
        kinds = [type(payload) for payload in reply.payloads]
        assert len(kinds) == len(set(kinds))
        assert frozenset(kinds) == run.protocol.uploads(reply.silo)


@every_protocol
def test_the_order_of_replies_does_not_change_the_merge_to_the_bit(name: str) -> None:
    run = world(name)
    run.round()
    replies = run.replies()
    forward = run.protocol.merge(run.state, replies, 1)
    backward = run.protocol.merge(run.state, replies[::-1], 1)
    assert equal_states(forward.state, backward.state)
    assert forward.log == backward.log


@every_protocol
def test_a_merge_changes_nothing_in_the_state_it_is_given(name: str) -> None:
    run = world(name)
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
    run = world(name)
    for silo in run.eligible:
        merged = run.protocol.merge(run.state, run.replies([silo]), 0)
        assert torch.isfinite(merged.state.theta).all()


@every_protocol
def test_one_task_of_a_silo_is_never_merged_twice(name: str) -> None:
    run = world(name)
    replies = run.replies()
    with pytest.raises(FedmqError):
        run.protocol.merge(run.state, [*replies, replies[0]], 0)


@every_protocol
def test_a_broken_update_is_refused(name: str) -> None:
    run = world(name)
    good = run.replies()
    delta = delta_of(good[0])
    spoilt = delta.buffer.copy()
    spoilt[3] = np.nan
    bad = [
        dataclasses.replace(delta, buffer=spoilt),
        dataclasses.replace(delta, buffer=delta.buffer[:-1].copy()),
        dataclasses.replace(delta, layout_digest="0" * 64),
        dataclasses.replace(delta, n_samples=0),
    ]
    for each in bad:
        payloads = tuple(each if isinstance(payload, Delta) else payload for payload in good[0].payloads)
        with pytest.raises(FedmqError):
            run.protocol.merge(run.state, [dataclasses.replace(good[0], payloads=payloads), *good[1:]], 0)


@every_protocol
def test_training_is_the_same_to_the_bit_whoever_used_the_model_before(name: str) -> None:
    runs = [world(name), world(name)]
    runs[1].train(runs[1].eligible[-1])
    runs[1].personal.clear()
    for one, other in zip(*(run.replies() for run in runs), strict=True):
        assert np.array_equal(delta_of(one).buffer, delta_of(other).buffer)


@every_protocol
def test_a_damped_reply_weighs_less(name: str) -> None:
    run = world(name, kinds=((True, True), (True, True)), sizes=(8, 8))
    replies = run.replies()
    first = torch.from_numpy(delta_of(replies[0]).buffer)

    def share_of_first(damping: float) -> float:
        given = [dataclasses.replace(replies[0], damping=damping), replies[1]]
        step = run.protocol.merge(run.state, given, 0).state.theta - run.state.theta
        rest = torch.from_numpy(delta_of(replies[1]).buffer)
        return float((step - rest).dot(first - rest) / (first - rest).square().sum())

    assert share_of_first(0.5) < share_of_first(1.0) - 0.05


@every_protocol
def test_a_state_survives_a_checkpoint_to_the_bit(name: str) -> None:
    run = world(name)
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
    run = world(name, kinds=kinds, sizes=[1] * len(kinds))
    for _ in range(2):
        if run.eligible:
            run.round()
    assert torch.isfinite(run.state.theta).all()
    for tensor in run.state.tensors.values():
        assert torch.isfinite(tensor).all()


@every_protocol
def test_read_only_buffers_off_the_wire_raise_no_warning(name: str) -> None:
    run = world(name)
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
    run = world(name)
    run.round()
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    run.round()
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


@every_protocol
def test_personal_tensors_can_be_saved(name: str) -> None:
    run = world(name)
    for silo in run.eligible:
        state = run.train(silo).state
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)


@every_protocol
def test_training_that_diverges_says_so_instead_of_sending_nan(name: str) -> None:
    run = world(name)
    run.model.load(torch.full_like(run.state.theta, float("nan")))
    run.state = dataclasses.replace(run.state, theta=torch.full_like(run.state.theta, float("nan")))
    with pytest.raises(RunError, match=r"silo-00.*learning_rate"):
        run.train(run.eligible[0])
