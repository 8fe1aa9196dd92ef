"""Attacks on the secure sums of a live run: who is attacked refuses by name, in its own log and in the coordinator's.

The coordinator attacks silo-00 in its own way in each round; in the last but one, silo-01 attacks the sum. In a run of
its own, as many silos as the threshold allows give the coordinator all that they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coordinator.sessions import Roster
from fedmq.audit.log_checks import audit_run
from fedmq.config.scenario import Scenario
from fedmq.federation.sums import SumLayout
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import MergeLine
from fedmq.storage.run_folder import RunFolder
from fedmq.wire import secure_sum
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import LogRecord, NoteRecord, RefusedRecord, read_log
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import (
    MaskedUpdate,
    Payload,
    RevealedShares,
    SealedShares,
    SumKeys,
    SumWeights,
    Survivors,
)
from fedmq.wire.secure_sum import U32, RoundSecrets, Sum
from silos.program import ReadySilo
from silos.secure_sums import SecureSums
from tests.threaded_run import resolved, run

Payloads = tuple[Payload, ...]
VICTIM, LIAR = "silo-00", "silo-01"
SETTINGS = ("protocol=fedavg", "participation=1.0", "evaluation.every=0", "missing_modality={}", "rounds=9")


def changed(payloads: Payloads, **values: object) -> Payloads:
    """Payloads of which the last one with these fields has other values in them."""
    place = max(at for at, each in enumerate(payloads) if set(values) <= set(each.FIELDS))
    return *payloads[:place], replace(payloads[place], **values), *payloads[place + 1 :]  # type: ignore[type-var]


def weights(payloads: Payloads) -> np.ndarray:
    return next(each for each in payloads if isinstance(each, SumWeights)).weights


def keys(payloads: Payloads) -> SumKeys:
    return next(each for each in payloads if isinstance(each, SumKeys))


def all_for_one(payloads: Payloads) -> Sequence[Payloads]:
    """Weights of 1 for silo-00 alone."""
    alone = np.zeros_like(weights(payloads))
    alone[:, 0] = 1.0
    return (changed(payloads, weights=alone),)


def other_weights(payloads: Payloads) -> Sequence[Payloads]:
    """Weights that the policy allows, but not those of the other silos."""
    return (changed(payloads, weights=0.9 * weights(payloads)),)


def invented_key(payloads: Payloads) -> Sequence[Payloads]:
    """A key of the coordinator's in place of silo-03's."""
    own = RoundSecrets.derive(bytes(32), "mine", 2).public
    return (changed(payloads, keys=np.stack([*keys(payloads).keys[:3], own])),)


def invented_silo(payloads: Payloads) -> Sequence[Payloads]:
    return (changed(payloads, silos=(*keys(payloads).silos[:3], "silo-99")),)


class Attacks:
    """What the coordinator sends silo-00 instead of its requests; in a second request if it answers the first."""

    def __init__(self) -> None:
        self.old: Payloads = ()  # of a round before
        #: By version: what silo-00 is asked for, what it is sent, and how it refuses.
        self.of: Mapping[int, tuple[type[Payload], Callable[[Payloads], Sequence[Payloads]], str]] = {
            0: (SumWeights, all_for_one, "a largest weight of 1.000, allowed: at most 0.75"),
            # It learns of it in the last step, with the others' weights; its masked update has made the sum noise.
            1: (SumWeights, other_weights, "other sum_weights of version 1 than before"),
            2: (SumWeights, lambda sent: (sent, *other_weights(sent)), "other sum_weights of version 2 than before"),
            # The shares of silo-03's own mask and of its key
            3: (
                Survivors,
                lambda sent: (sent, changed(sent[:3], silos=("silo-00", "silo-01", "silo-02")) + sent[3:]),
                "other survivors of version 3 than before",
            ),
            4: (SumKeys, invented_key, "keys that silo-03 did not sign for this round and these silos"),
            5: (SumKeys, invented_silo, "keys of silo-99, whose public key is not accepted here"),
            6: (SumKeys, lambda _: (self.old,), "did not sign for this round and these silos"),
        }

    def of_request(self, message: Message) -> Sequence[Payloads]:
        last = [each for each in message.payloads if isinstance(each, SumKeys | SumWeights | Survivors)][-1]
        if isinstance(last, SumKeys) and message.header.base_version == 5:
            self.old = message.payloads
        asked, attack, _ = self.of.get(message.header.base_version, (None, None, ""))
        return (message.payloads,) if attack is None or type(last) is not asked else attack(message.payloads)


@pytest.fixture(scope="module")
def attacked(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with an attack in each round but the last."""
    folder, attacks, old = tmp_path_factory.mktemp("attacked") / "run", Attacks(), dict[int, Payloads]()
    send, respond = Roster.send, ReadySilo.respond

    def sent(roster: Roster, name: str, message: Message | Header) -> int:
        if name != VICTIM or not isinstance(message, Message) or message.header.kind is not Kind.SUM:
            return send(roster, name, message)
        return min(send(roster, name, replace(message, payloads=each)) for each in attacks.of_request(message))

    def replayed(ready: ReadySilo, message: Message) -> Payloads:
        payloads, version = respond(ready, message), message.header.base_version
        if ready.silo.facts.name == LIAR and isinstance(payloads[0], MaskedUpdate):
            old[version] = payloads
            return old[6] if version == 7 else payloads
        return payloads

    folder.mkdir()
    scenario = resolved(tiny, *SETTINGS, "privacy.secure_aggregation=true")
    (folder / "scenario.yaml").write_text(scenario.dump())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roster, "send", sent)
        patch.setattr(ReadySilo, "respond", replayed)
        run(scenario, folder)
    return folder


def records(folder: Path, process: str) -> list[LogRecord]:
    return [record for _, record in read_log(RunFolder(folder).messages(process)) if record is not None]


def test_a_silo_refuses_each_attack_in_both_logs(attacked: Path) -> None:
    own = [each.detail for each in records(attacked, VICTIM) if isinstance(each, RefusedRecord)]
    notes = [each for each in records(attacked, "coordinator") if isinstance(each, NoteRecord)]
    told = [str(each.facts["error"]) for each in notes if each.event is LogEvent.ERROR_REPORTED]
    wanted = [text for _, _, text in Attacks().of.values()]
    for found in (own, told):
        assert len(found) == len(wanted), found
        assert all(text in each for text, each in zip(wanted, found, strict=True)), found
    assert all(each.facts["peer"] == VICTIM for each in notes if each.event is LogEvent.ERROR_REPORTED)


def test_rounds_go_on_without_the_silo_that_was_attacked(attacked: Path) -> None:
    merged = [set(line.replies) for line in read_metrics(RunFolder(attacked)) if isinstance(line, MergeLine)]
    others, everyone = {"silo-01", "silo-02", "silo-03"}, {"silo-00", "silo-01", "silo-02", "silo-03"}
    assert merged == [others, set(), everyone, everyone, others, others, others, everyone - {LIAR}, everyone]
    ended = [each for each in records(attacked, "coordinator") if isinstance(each, NoteRecord)]
    (why,) = [each.facts["why"] for each in ended if each.event is LogEvent.SUM_ENDED]
    assert "a silo sent, or was sent, something else than the others" in str(why)


def test_the_masked_update_of_an_old_round_is_refused_by_name(attacked: Path) -> None:
    refused = [each for each in records(attacked, "coordinator") if isinstance(each, RefusedRecord)]
    assert [(each.peer, each.reason, each.detail) for each in refused] == [
        (LIAR, "sum", "the masked update of version 6 again")
    ]


def test_the_audit_finds_what_silo_00_was_sent(attacked: Path) -> None:
    whats = [each.what for each in audit_run(attacked).findings]
    for version, kind in ((0, "sum_weights"), (1, "sum_weights"), (4, "sum_keys"), (5, "sum_keys"), (6, "sum_keys")):
        assert any(f"{kind} of version {version}" in what and VICTIM in what for what in whats), (version, whats)


class Collusion:
    """What the coordinator has of the one round of an honest run, and what silos of it can add."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.folder, self.answers = folder, dict[tuple[str, type[Payload]], Payload]()
        self.updates = dict[str, U32]()  # what each silo sent, before it was masked: nobody else has it
        respond, masked = ReadySilo.respond, SecureSums._masked

        def answered(ready: ReadySilo, message: Message) -> Payloads:
            payloads = respond(ready, message)
            self.answers |= {(ready.silo.facts.name, type(each)): each for each in payloads}
            return payloads

        def summed(sums: SecureSums, agreed: Sum, layout: SumLayout) -> MaskedUpdate:
            name, kept, self.agreed = sums._identity.name, sums._kept, agreed
            self.updates[name] = np.empty(agreed.size(name), np.uint32)
            for place, where in agreed.sections(name).items():
                values, weight = kept.values[agreed.weights.branches[place]], float(agreed.row(name)[place])  # type: ignore[union-attr]
                secure_sum.fixed_point(values, weight, agreed.bounds[place], self.updates[name][where])
            return masked(sums, agreed, layout)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ReadySilo, "respond", answered)
            patch.setattr(SecureSums, "_masked", summed)
            run(scenario, folder)

    def secrets(self, silo: str) -> RoundSecrets:
        """A silo's secrets, from its disk."""
        secret = (RunFolder(self.folder).silo_state(silo) / "sums.key").read_bytes()
        return RoundSecrets.derive(secret, self.agreed.run, self.agreed.version)

    def shares(self, owner: str, *holders: str) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """The shares of a silo's own seed and of the seed of its key that these silos were sent."""
        agreed, found = self.agreed, (dict[int, bytes](), dict[int, bytes]())
        context = secure_sum.share_context(agreed.run, agreed.version, agreed.roster, agreed.keys)
        sealed, sender = self.answers[owner, SealedShares], secure_sum.public_key(agreed.keys, owner, 1)
        for name in holders:
            place = agreed.keys.silos.index(name)
            one = sealed.sealed[place]  # type: ignore[attr-defined]
            opened = secure_sum.open_share(self.secrets(name).seal_key, sender, context, (owner, name), one)
            found[0][place], found[1][place] = opened
        return found

    def revealed(self, owner: str, *helpers: str) -> bytes:
        """A silo's secret of the kind that the silos revealed to the coordinator."""
        row, places = self.agreed.weights.silos.index(owner), self.agreed.keys.silos.index
        shares = {places(name): self.answers[name, RevealedShares].shares[row].tobytes() for name in helpers}  # type: ignore[attr-defined]
        return secure_sum.combined(shares)

    def without_masks(self, silo: str, own_seed: bytes, keys: Mapping[str, X25519PrivateKey]) -> U32:
        """A silo's masked update less its own mask and its masks for pairs, each by a key of either silo."""
        total = np.array(self.answers[silo, MaskedUpdate].buffer)  # type: ignore[attr-defined]
        masks = [self.agreed.own_mask(silo, own_seed, sign=-1)]
        masks += [self.agreed.pair_mask(key, silo, other, sign=-1) for other, key in keys.items()]
        secure_sum.add_masks(total, self.agreed.sections(silo), masks)
        return total


def test_one_silo_less_than_the_threshold_and_the_coordinator_do_not_learn_an_update(
    tiny: Path, tmp_path: Path
) -> None:
    """silo-02 and silo-03 give the coordinator their secrets and the shares that they were sent."""
    scenario = resolved(tiny, *SETTINGS[:-1], "rounds=1", "privacy.secure_aggregation=true")
    found, everyone = Collusion(tmp_path, scenario), scenario.silo_names
    honest, colluding = everyone[1], everyone[2:]
    threshold = scenario.privacy.secure_aggregation.threshold  # type: ignore[union-attr]
    assert len(colluding) == secure_sum.needed(len(everyone), threshold) - 1
    public = found.secrets(VICTIM).public[0].tobytes()

    # The coordinator has the seed of the own mask, as the victim is in the sum; the colluding silos know their pairs.
    own_seed = found.revealed(VICTIM, honest, *colluding)
    assert own_seed == found.secrets(VICTIM).own_seed
    pairs = {name: found.secrets(name).mask_key for name in colluding}

    def attacked(*holders: str) -> tuple[bool, U32]:
        """Whether the victim's key follows from the shares of these silos, and its update by that key."""
        key = secure_sum.mask_key(secure_sum.combined(found.shares(VICTIM, *holders)[1]))
        update = found.without_masks(VICTIM, own_seed, pairs | {honest: key})
        return key.public_key().public_bytes_raw() == public, update

    # What is left is the mask of the two honest silos: the values are as good as random.
    for update in (found.without_masks(VICTIM, own_seed, pairs), attacked(*colluding)[1]):
        noise = (update - found.updates[VICTIM]) / 2**32
        assert abs(noise.mean() - 0.5) < 5 / np.sqrt(12 * noise.size)
        assert abs(noise.std() - 12**-0.5) < 5 / np.sqrt(60 * noise.size)
    assert not attacked(*colluding)[0]

    # One share more, from the other honest silo, would open it.
    known, update = attacked(honest, *colluding)
    assert known and np.array_equal(update, found.updates[VICTIM])
