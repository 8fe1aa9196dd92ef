"""Privacy accounting of an audit: the epsilon of the updates that left each silo, and what the noise does not cover."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.sessions import Roster
from fedmq.audit.dp_accounting import account
from fedmq.audit.log_checks import Audit, audit_run
from fedmq.errors import InputError
from fedmq.federation.noise import item_epsilon
from fedmq.wire.log_records import MessageRecord
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Model
from silos.program import AgreedSchedule
from tests.adversary_forged_logs import message_record
from tests.command_line import printed, refused
from tests.threaded_run import resolved, run

NOISE = "privacy={clip_norm: 0.5, noise_multiplier: 2.0}"


def delta_of(epsilon: float, multiplier: float, updates: int) -> float:
    """Delta of ``updates`` composed Gaussian mechanisms (Dong et al. 2022), by Balle and Wang 2018, equation 6."""
    mu = math.sqrt(updates) / multiplier
    near, far = (math.erfc((epsilon / mu + side * mu / 2) / math.sqrt(2)) / 2 for side in (-1, 1))
    return near - math.exp(epsilon) * far


def message(sender: str, *payloads: tuple[str, str], kind: Kind = Kind.REPLY) -> tuple[str, MessageRecord]:
    return "log:1", message_record(sender, *((name, 4, content) for name, content in payloads), kind=kind)


def audited(*messages: tuple[str, MessageRecord]) -> Audit:
    return Audit(messages=list(messages))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    (tmp_path / "scenario.yaml").write_text(resolved(tiny, NOISE).dump())
    return tmp_path


def test_epsilon_is_that_of_composed_gaussian_mechanisms(folder: Path) -> None:
    for updates, delta in ((1, 1e-9), (2, 0.05), (7, 1e-5), (200, 1e-9), (200, 0.05)):
        audit = audited(*(message("silo-00", ("delta", str(number))) for number in range(updates)))
        spent = account(folder, audit, delta).silos["silo-00"]
        assert spent.updates == updates
        assert delta_of(spent.epsilon, 2.0, updates) == pytest.approx(delta, rel=1e-3)


def test_an_update_counts_once_even_if_it_is_sent_or_logged_several_times(folder: Path) -> None:
    once = audited(message("silo-00", ("delta", "a")), message("silo-00", ("partial_delta", "b")))
    twice = audited(*once.messages, *once.messages)
    assert account(folder, twice, 1e-5) == account(folder, once, 1e-5)
    assert account(folder, once, 1e-5).silos["silo-00"].updates == 2
    second = audited(message("silo-00", ("delta", "a"), ("discriminator_delta", "c")))
    assert account(folder, second, 1e-5).silos["silo-00"].updates == 2, "two updates in one reply"


def test_payloads_without_noise_are_named_for_silos_only(folder: Path) -> None:
    audit = audited(
        message("coordinator", ("model", "m"), kind=Kind.TASK),
        message("evaluator", ("metrics", "e")),
        message("silo-01", ("loss", "l"), ("delta", "d"), ("loss", "k"), ("sealed_shares", "s")),
        message("silo-02", ("error", "x"), kind=Kind.ERROR),
    )
    silos = account(folder, audit, 1e-5).silos
    assert set(silos) == {"silo-01", "silo-02"}
    assert (silos["silo-01"].updates, silos["silo-01"].beside) == (1, ("loss",))
    assert (silos["silo-02"].updates, silos["silo-02"].epsilon, silos["silo-02"].beside) == (0, 0.0, ("error",))


def test_a_delta_outside_0_to_1_and_a_run_without_noise_are_refused(folder: Path, tiny: Path, tmp_path: Path) -> None:
    for delta in ("0", "1", "-1e-5", "nan"):  # before the logs, which this folder lacks, are read
        assert "--delta: found" in refused("audit", folder, f"--delta={delta}")
    (tmp_path / "scenario.yaml").write_text(resolved(tiny, "privacy={clip_norm: 0.5}").dump())
    with pytest.raises(InputError, match=r"noise_multiplier: found 0, allowed: above 0"):
        account(tmp_path, audited(), 1e-5)


@pytest.mark.parametrize(("checked", "answers"), [(False, 23), (True, 3)])
def test_every_answer_to_a_coordinator_that_asks_too_often_counts_in_epsilon(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool, answers: int
) -> None:
    """23 tasks in a run of 3 rounds, all but 3 of them with a number that was used before and another model."""
    send = Roster.send

    def asking(roster: Roster, name: str, message: Message | Header) -> int:
        sent = send(roster, name, message)
        if isinstance(message, Message) and message.task is not None and name == "silo-01" and message.task.round < 2:
            for step in range(1, 11):
                payloads = (
                    replace(each, buffer=each.buffer + np.float32(step / 100)) if isinstance(each, Model) else each
                    for each in message.payloads
                )
                send(roster, name, replace(message, payloads=tuple(payloads)))
        return sent

    monkeypatch.setattr(Roster, "send", asking)
    if not checked:
        monkeypatch.setattr(AgreedSchedule, "check", lambda *_: None)
    scenario = resolved(tiny, "protocol=fedavg", "missing_modality={}", "participation=1.0", "rounds=3", NOISE)
    run(scenario, tmp_path)
    silos = account(tmp_path, audit_run(tmp_path), 1e-5).silos
    assert (silos["silo-00"].updates, silos["silo-01"].updates) == (3, answers)
    assert delta_of(silos["silo-01"].epsilon, 2.0, answers) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.slow
def test_the_audit_of_a_real_run_reports_its_privacy_guarantee(tiny: Path, tmp_path: Path) -> None:
    noise = NOISE.replace("}", ", items: {group: 4, clip_norm: 0.1, noise_multiplier: 1.5}}")
    scenario = resolved(tiny, "protocol=fedavg", "missing_modality={}", "participation=1.0", "rounds=3", noise)
    summary = run(scenario, tmp_path).summary
    assert summary is not None
    (tmp_path / "scenario.yaml").write_text(scenario.dump())
    kept = (tmp_path / "summary.json").rename(tmp_path / "kept.json")
    with pytest.raises(InputError, match="no summary"):
        account(tmp_path, audit_run(tmp_path), 1e-5)
    kept.rename(tmp_path / "summary.json")
    shown = " ".join(printed("audit", tmp_path, "--delta", "1e-5").split())
    assert "there is no guarantee against anyone who knows the seed" in shown
    assert "It covers neither their numbers of samples nor the other payloads." in shown
    assert "Epsilon covers one training item of a silo, replaced by another one, in its updates" in shown
    accounts = json.loads(printed("audit", tmp_path, "--delta", "1e-5", "--json"))["accounts"]
    assert set(accounts["silos"]) == set(scenario.silo_names)
    for spent in accounts["silos"].values():
        assert delta_of(spent["epsilon"], 2.0, 3) == pytest.approx(1e-5, rel=1e-3)
        assert (spent["updates"], spent["beside"]) == (3, ["data_statement", "loss", "modality_prototypes"])
    for name, spent in accounts["items"].items():
        expected = item_epsilon(scenario, summary.per_silo[name].samples, 3, 0.0, 1e-5)
        assert spent["epsilon"] == pytest.approx(expected), "the updates' own noise is not counted again"
        assert (spent["updates"], spent["beside"]) == (3, ["data_statement", "loss", "modality_prototypes"])
    assert set(accounts["items"]) == set(scenario.silo_names)
