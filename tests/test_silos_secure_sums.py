"""Secure sums between the real classes of silos and coordinator: what an honest sum gives, and what attacks learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from Crypto.Protocol.SecretSharing import Shamir

from coordinator.round_events import Stage
from coordinator.secure_sums import Answer
from fedmq.clock import VirtualClock
from fedmq.errors import InputError, RemoteWireError, RunError
from fedmq.runs.report.logs import LogFacts, add_records, unsummed
from fedmq.wire import secure_sum
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Delta, Payload, RevealedShares, SumKeys, SumWeights, Survivors
from fedmq.wire.secure_sum import RoundSecrets
from protocols.parts import aggregation
from silos.program import AgreedSchedule
from silos.secure_sums import SecureSums as OfSilo
from tests.secure_round import KINDS, NAMES, SIZES, Round, begin
from tests.small_federation import population
from tests.threaded_run import run_of

LARGEST = 2.0**-4


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> Round:
    """A round in which nothing has happened."""
    federation = population("fedavg", {"single_modality": "idle"}, kinds=KINDS, sizes=SIZES)
    generator, layout = np.random.default_rng(0), federation.model.layout
    replies = dict[str, tuple[Payload, ...]]()
    for silo in federation.context.silos:
        change = generator.uniform(-LARGEST, LARGEST, layout.size).astype(np.float32)
        for branch, part in aggregation.branch_slices(layout).items():
            change[part] *= aggregation.owns(silo, branch)
        replies[silo.name] = (Delta(layout.digest, change, 5 + silo.index),)
    settings = ("protocol=fedavg", f"privacy.secure_aggregation={{range: {LARGEST}}}")
    return begin(tiny, tmp_path, federation, replies, *settings)


def delta_of(start: Round, silo: str) -> Delta:
    (delta,) = start.replies[silo]
    assert isinstance(delta, Delta)
    return delta


def test_the_sum_is_the_plain_one_to_the_bit_whoever_drops_out(start: Round) -> None:
    alive = tuple(name for name in NAMES if name != "silo-03")
    start.reported(*NAMES)
    start.step(Stage.SHARE, *NAMES)
    masked = start.step(Stage.MASK, *alive)
    start.step(Stage.REVEAL, *alive)
    assert start.coordinator.complete
    found = start.coordinator._sections
    assert found is not None
    for mine, expected in zip(found.values(), start.fixed_point_sums(*alive).values(), strict=True):
        assert np.array_equal(mine, expected)
    # What left a silo is not its update: its values are as good as random.
    values = np.concatenate([np.asarray(masked[name].buffer) for name in alive]) / 2**32  # type: ignore[attr-defined]
    assert abs(values.mean() - 0.5) < 5 / np.sqrt(12 * values.size)
    # Each branch is divided by the weights that arrived, as the plain merge of these replies does.
    assert torch.allclose(start.merged(*alive).theta, start.plain(*alive).theta, rtol=0, atol=1e-7)


def refused(start: Round, silo: str, payloads: Sequence[Payload], text: str, reason: str = "sum") -> None:
    """A silo refuses a request, and its log says why."""
    with pytest.raises(RemoteWireError, match=text) as error:
        start.answer(silo, payloads)
    assert error.value.reason == reason
    assert text in (start.folder / f"{silo}.jsonl").read_text()


def weights_of(start: Round, row: Sequence[float]) -> tuple[SumKeys, SumWeights]:
    """The keys of the round, and other weights of both branches than the method's."""
    keys, weights = start.coordinator.request(Stage.MASK, "silo-00")
    assert isinstance(keys, SumKeys) and isinstance(weights, SumWeights)
    return keys, replace(weights, weights=np.array([row, row]))


def test_a_silo_refuses_weights_that_single_it_out_or_are_none(start: Round) -> None:
    start.reported(*NAMES)
    start.step(Stage.SHARE, *NAMES)
    for row, text in (
        ((1.0, 0.0, 0.0, 0.0, 0.0), "a largest weight of 1.000, allowed: at most 0.75"),
        ((0.7, 0.1, 0.1, 0.1, 0.0), "weights of 1.92 effective silos, allowed: at least 2"),
        ((-0.5, 0.5, 0.5, 0.5, 0.0), "weights below 0"),
        ((0.5, 0.5, 0.5, 0.5, 0.0), "a sum above 1"),
    ):
        refused(start, "silo-00", weights_of(start, row), text)
    keys, weights = weights_of(start, (0.25, 0.25, 0.25, 0.25, 0.0))
    few = replace(weights, silos=NAMES[:3], weights=weights.weights[:, :3].copy())
    refused(start, "silo-00", (keys, few), "a sum of 3 silos, allowed: at least 4")
    refused(start, "silo-00", (keys, replace(weights, layout_digest="0" * 64)), "another layout")


def test_silos_that_are_told_different_weights_give_noise(start: Round) -> None:
    start.reported(*NAMES)
    start.step(Stage.SHARE, *NAMES)
    found = {name: start.answer(name, start.coordinator.request(Stage.MASK, name)) for name in NAMES[1:]}
    found["silo-00"] = start.answer("silo-00", weights_of(start, (0.6, 0.1, 0.1, 0.1, 0.1)))
    size = start.coordinator._sum.size("silo-00")  # type: ignore[union-attr]
    assert len(found["silo-00"].buffer) == size  # type: ignore[attr-defined]
    start.collect(Stage.MASK, {name: Answer(3, found[name]) for name in NAMES})  # type: ignore[arg-type]
    start.step(Stage.REVEAL, *NAMES)
    assert not start.coordinator.complete and "out of range" in start.coordinator.ends
    assert "sum_ended" in (start.folder / "coordinator.jsonl").read_text()


def test_a_coordinator_cannot_invent_silos_or_keys_or_use_those_of_another_round(start: Round) -> None:
    start.reported(*NAMES)
    (keys,) = start.coordinator.request(Stage.SHARE, "silo-00")
    assert isinstance(keys, SumKeys)
    own = RoundSecrets.derive(bytes(32), "mine", 2).public
    forged = replace(keys, keys=np.stack([*keys.keys[:4], own]))
    refused(start, "silo-00", (forged,), "keys that silo-04 did not sign", "bad_signature")
    strange = replace(keys, silos=(*NAMES[:4], "silo-99"))
    refused(start, "silo-00", (strange,), "keys of silo-99, whose public key is not accepted here")
    refused(start, "silo-00", (replace(keys, silos=NAMES[::-1]),), "did not sign", "bad_signature")
    start.version = 3
    refused(start, "silo-00", (keys,), "did not sign for this round", "bad_signature")


def test_the_coordinator_refuses_a_silo_that_accepts_other_keys_and_a_silo_without_all_keys(start: Round) -> None:
    keys, run = start.folder / "keys", run_of(start.context.scenario)
    other = start.folder / "other"
    init_keys(other, ("coordinator", "evaluator", *NAMES))
    log = MessageLog(start.folder / "x.jsonl", "silo-00", VirtualClock())
    strange = OfSilo(run, load_identity(keys, "silo-00"), load_accepted(other), other, start.folder, log)
    silo = start.context.context.silos[0]
    payloads = strange.withhold(2, start.replies["silo-00"], start.layout, silo, start.privacy)
    header = Header(
        run="run-0",
        kind=Kind.REPLY,
        sender="silo-00",
        receiver="coordinator",
        sequence=3,
        reply_to=3,
        base_version=2,
        sent_at=0.0,
    )
    with pytest.raises(RemoteWireError, match="silo-00 accepts other silos or keys than the coordinator"):
        start.coordinator.checked(Message(header, payloads), None)
    few = {name: key for name, key in load_accepted(keys).items() if name != "silo-03"}
    with pytest.raises(InputError, match="no key of silo-03"):
        OfSilo(run, load_identity(keys, "silo-00"), few, keys, start.folder, log)


def test_a_silo_answers_one_sum_in_each_round_also_after_a_restart(start: Round) -> None:
    """So the coordinator never gets both kinds of shares of a silo, nor the same update in two sums."""
    start.reported(*NAMES)
    start.step(Stage.SHARE, *NAMES)
    start.step(Stage.MASK, *NAMES)
    request = start.coordinator.request(Stage.REVEAL, "silo-00")
    without = tuple(replace(each, silos=NAMES[:4]) if isinstance(each, Survivors) else each for each in request)
    run, traits = run_of(start.context.scenario), start.context.traits
    log = MessageLog(start.folder / "agreed.jsonl", "silo-00", VirtualClock())
    agreed = AgreedSchedule(run, traits, log)
    facts = {"run": run.id, "sender": "coordinator", "receiver": "silo-00", "session": bytes(16)}
    header = Header(kind=Kind.SUM, sequence=3, base_version=2, sent_at=0.0, **facts)  # type: ignore[arg-type]
    with pytest.raises(RemoteWireError, match="without this silo's task"):
        agreed.check(Message(header, request))
    agreed._tasks[2] = 3, ()
    agreed.check(Message(header, request))
    log.message("received", Message(header, request), "00" * 16, 3000)
    agreed.check(Message(header, request))
    for later in (agreed, AgreedSchedule(run, traits, log)):
        later._tasks[2] = 3, ()
        with pytest.raises(RemoteWireError, match="other survivors of version 2 than before"):
            later.check(Message(header, without))
        other = weights_of(start, (0.2, 0.2, 0.2, 0.2, 0.2))
        with pytest.raises(RemoteWireError, match="other sum_weights of version 2 than before"):
            later.check(Message(header, other))


def test_shares_are_of_one_kind_and_too_few_of_them_say_nothing(start: Round) -> None:
    alive = NAMES[:4]
    start.reported(*NAMES)
    start.step(Stage.SHARE, *NAMES)
    start.step(Stage.MASK, *alive)
    revealed = start.step(Stage.REVEAL, *alive)
    secrets = {name: start.silos[name]._own(2) for name in NAMES}
    for row, name in enumerate(NAMES):
        shares = {place: revealed[helper].shares[row].tobytes() for place, helper in enumerate(alive)}  # type: ignore[attr-defined]
        wanted, other = secrets[name].own_seed, secrets[name].key_seed
        if name not in alive:
            wanted, other = other, wanted
        assert secure_sum.combined(shares) == wanted
        assert Shamir.combine([(place + 1, share) for place, share in shares.items()]) == wanted
        for left_out in shares:  # three colluding silos, one less than needed
            few = {place: share for place, share in shares.items() if place != left_out}
            assert secure_sum.combined(few) not in (wanted, other)


def test_a_sum_that_cannot_be_opened_ends_the_round_and_names_the_silo(start: Round) -> None:
    start.reported(*NAMES)
    start.step(Stage.SHARE, *NAMES)
    start.step(Stage.MASK, *NAMES)
    found = {name: start.answer(name, start.coordinator.request(Stage.REVEAL, name)) for name in NAMES}
    lie = found["silo-01"]
    assert isinstance(lie, RevealedShares)
    found["silo-01"] = RevealedShares(lie.shares ^ np.eye(5, 16, dtype=np.uint8))
    start.collect(Stage.REVEAL, {name: Answer(3, found[name]) for name in NAMES})  # type: ignore[arg-type]
    assert not start.coordinator.complete
    assert (
        "the shares of silo-00 from silo-00, silo-01, silo-02, silo-03 do not give its secret" in start.coordinator.ends
    )


def test_an_update_out_of_range_is_refused_at_the_silo_and_never_clipped(start: Round) -> None:
    change = np.zeros(start.context.context.layout.size, np.float32)
    silo, digest = start.context.context.silos[0], start.context.context.layout.digest
    for value, shown in ((LARGEST * 1.01, "0.0631"), (np.nan, "nan")):
        change[7] = value
        with pytest.raises(RunError, match=f"changes a parameter by {shown}, allowed: at most 0.0625"):
            start.silos["silo-00"].withhold(2, (Delta(digest, change, 5),), start.layout, silo, start.privacy)
    change[7] = LARGEST
    start.silos["silo-00"].withhold(2, (Delta(digest, change, 5),), start.layout, silo, start.privacy)


def test_a_branch_whose_weights_would_single_a_silo_out_is_left_as_it_is(start: Round) -> None:
    text = aggregation.branch_slices(start.context.context.layout)["text"]
    for name in ("silo-01", "silo-03"):  # the captions' branch is trained by silo-00 and, with one sample, silo-02
        changed = np.array(delta_of(start, name).buffer)
        changed[text] = 0.0
        start.replies[name] = (replace(delta_of(start, name), buffer=changed),)
    start.replies["silo-00"] = (replace(delta_of(start, "silo-00"), n_samples=11),)
    start.replies["silo-02"] = (replace(delta_of(start, "silo-02"), n_samples=1),)
    start.reported(*NAMES)
    for stage in (Stage.SHARE, Stage.MASK, Stage.REVEAL):
        start.step(stage, *NAMES)
    merged = start.merged(*NAMES).theta
    assert torch.equal(merged[text], start.state.theta[text]) and not torch.equal(merged, start.state.theta)
    facts = LogFacts()
    add_records(facts, (start.folder / "coordinator.jsonl").read_bytes().splitlines())
    (told,) = unsummed(facts)
    assert told.startswith("Secure sums left text unchanged in round 3: a largest weight of 0.917"), told
