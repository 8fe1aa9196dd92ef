"""Noise on what silos send besides updates, the epsilon of all of it, and the budget that stops a silo."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import protocols
from coordinator.participation import RoundsPlan
from fedmq.audit.dp_accounting import account
from fedmq.audit.log_checks import audit_run
from fedmq.config.privacy import Noise, Privacy, Statistic
from fedmq.errors import InputError
from fedmq.federation.noise import UPDATES, affordable_tasks, epsilon_of, item_epsilon, protected, spent
from fedmq.launch.forkserver import CONTEXT, private_folder, warm_up
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_records import StartRecord, read_log
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import (
    ClassPrototypes,
    ControlVariate,
    Delta,
    Geometry,
    LabelCount,
    LocalSteps,
    Loss,
    MeanAveragePrecision,
    Memory,
    ModalityPrototypes,
    Payload,
    Representations,
)
from silos.program import ReadySilo, run_silo
from silos.tasks import SiloArguments
from tests import in_process_run
from tests.small_federation import population
from tests.threaded_run import resolved, run, run_of
from tests.waiting import PATIENCE

PATH = ("silo-00", 3, 2)
ONES = np.ones((40, 50), np.float32)
COUNTS = np.full(40, 7, np.int64)
#: A payload of each kind that can get noise.
EXAMPLES: tuple[Payload, ...] = (
    ModalityPrototypes(ONES[0].copy(), ONES[1].copy(), 3),
    ClassPrototypes(ONES, COUNTS, "both"),
    Memory(ONES, COUNTS),
    Representations(ONES.astype(np.float16), "image"),
    Geometry(np.ones(4, np.float32)),
    Loss(2.0),
    MeanAveragePrecision(0.5),
)


def noisy(kind: str, multiplier: float = 0.5, norm: float = 1e3) -> Privacy:
    return Privacy.model_validate({"statistics": {kind: {"clip_norm": norm, "noise_multiplier": multiplier}}})


def numbers(payload: Payload) -> Mapping[str, np.ndarray]:
    return {each.name: np.asarray(getattr(payload, each.name)) for each in fields(payload)}  # type: ignore[arg-type]


@pytest.mark.parametrize("payload", EXAMPLES, ids=lambda payload: payload.KIND)
def test_noise_is_added_to_the_numbers_of_a_kind_and_to_nothing_else(payload: Payload) -> None:
    before, privacy = numbers(payload), noisy(payload.KIND)
    drawn = {}
    for silo in range(30 if next(iter(before.values())).size < 10 else 1):
        after = numbers(protected(payload, privacy, 0, (f"silo-{silo:02d}", 0, 1), idle=True))
        for name, value in before.items():
            assert (after[name].dtype, after[name].shape) == (value.dtype, value.shape)
            if value.dtype.kind == "f":
                drawn.setdefault(name, []).append((after[name].astype(np.float64) - value).ravel())
            else:
                assert np.array_equal(after[name], value), name
    if payload.KIND == "map":
        ends = {0.0, 1.0}
        assert {float(each[0]) + 0.5 for each in drawn["value"]} == ends, "a fraction stays one"
        return
    noise = np.concatenate([part for parts in drawn.values() for part in parts])
    assert float(noise.std()) == pytest.approx(500, rel=5 / np.sqrt(2 * noise.size))
    assert protected(payload, Privacy(), 0, PATH, idle=False) is payload
    assert protected(payload, noisy(payload.KIND, 0.0), 0, PATH, idle=False) is payload, "short, and without noise"
    clipped = protected(payload, noisy(payload.KIND, 0.0, 0.25), 0, PATH, idle=False)
    squares = sum(
        float((value.astype(np.float64) ** 2).sum()) for value in numbers(clipped).values() if value.dtype.kind == "f"
    )
    assert squares == pytest.approx(0.0625, rel=1e-3), "all numbers of a payload together"


def test_every_kind_that_silos_send_with_numbers_can_get_noise_by_name() -> None:
    known = {payload.KIND for payload in EXAMPLES}
    assert known == set(get_args(Statistic))
    for name in protocols.names():
        method = population(name)
        sent = {kind.KIND for silo in method.context.silos for kind in method.protocol.uploads(silo)}
        assert sent <= known | {kind.KIND for kind in UPDATES} | {
            LabelCount.KIND,
            LocalSteps.KIND,
            ControlVariate.KIND,
        }, "counts get no noise, and a control variate is to arrive exactly"


def test_an_idle_silo_adds_noise_to_its_statistics_only() -> None:
    update = Delta("0" * 64, np.ones(4, np.float32), 9)
    both = Privacy(clip_norm=1.0, noise_multiplier=1.0, statistics={"loss": Noise(clip_norm=1.0, noise_multiplier=1.0)})
    assert protected(update, both, 0, PATH, idle=True) is update, "an idle silo's update does not depend on its data"
    assert protected(Loss(0.0), both, 0, PATH, idle=True) != Loss(0.0)


def test_rows_of_too_few_samples_are_not_sent() -> None:
    counts = np.array([0, 1, 2, 3, 40], np.int64)
    for payload in (ClassPrototypes(ONES[:5], counts, "both"), Memory(ONES[:5], counts)):
        sent = protected(payload, Privacy(least_support=3), 0, PATH, idle=False)
        rows, kept = (value for value in numbers(sent).values() if value.ndim)
        assert kept.tolist() == [0, 0, 0, 3, 40]
        assert rows.any(1).tolist() == [False, False, False, True, True]


def test_epsilon_is_dp_accountings_for_the_same_events() -> None:
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    privacy = Privacy.model_validate(
        {
            "clip_norm": 1.0,
            "noise_multiplier": 6.0,
            "statistics": {"loss": {"clip_norm": 2.0, "noise_multiplier": 9.0}, "geometry": {"clip_norm": 1.0}},
        }
    )
    accountant = PLDAccountant()
    for _ in range(10):
        accountant.compose(GaussianDpEvent(6.0)).compose(GaussianDpEvent(9.0))
    ours = epsilon_of(10 * spent(("delta", "loss", "geometry", "data_statement"), privacy), 1e-5)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert epsilon_of(spent(("geometry",), privacy), 1e-5) == 0.0, "clipped, without noise"


#: Options that change nothing: no noise, and clipping norms that nothing reaches. Of a silo with one modality, the
#: geometry has a ratio of about 1e7.
NOTHING = (
    "privacy={clip_norm: 1.0e+9, noise_multiplier: 0, capture: true, least_support: 1, "
    "statistics: {loss: {clip_norm: 1.0e+9}, geometry: {clip_norm: 1.0e+9}, modality_prototypes: {clip_norm: 1.0e+9}}}"
)


def test_without_noise_and_with_nothing_to_clip_a_run_is_the_plain_one_to_the_bit(tiny: Path, tmp_path: Path) -> None:
    digests = []
    for number, privacy in enumerate(("privacy={}", "privacy={clip_norm: null, noise_multiplier: 0}", NOTHING)):
        summary = in_process_run.run(resolved(tiny, privacy), tmp_path / str(number)).summary
        assert summary is not None and summary.versions == 4
        digests.append(summary.model_digest)
    clipped = in_process_run.run(resolved(tiny, NOTHING.replace("1.0e+9", "1.0e-3")), tmp_path / "clipped").summary
    assert clipped is not None and digests == [digests[0]] * 3 != [clipped.model_digest] * 3


def test_a_budget_allows_the_largest_number_of_tasks_within_it(tiny: Path) -> None:
    kinds = [frozenset({Delta}), frozenset({Delta, Loss})]
    noise = {"clip_norm": 1.0, "noise_multiplier": 4.0}
    for epsilon, tasks in ((0.01, 0), (2.0, None), (1e6, 50)):
        privacy = Privacy.model_validate({**noise, "statistics": {"loss": noise}, "budget": {"epsilon": epsilon}})
        scenario = resolved(tiny).model_copy(update={"privacy": privacy})
        numbers_of = affordable_tasks(scenario, kinds, [7], 50)
        assert numbers_of is not None
        found = numbers_of[7]
        assert tasks in (None, found)
        each = spent(("delta", "loss"), privacy)
        assert epsilon_of(found * each, 1e-5) <= epsilon
        assert found == 50 or epsilon_of((found + 1) * each, 1e-5) > epsilon
    assert affordable_tasks(resolved(tiny), kinds, [7], 50) is None


def test_a_budget_of_items_depends_on_their_number(tiny: Path) -> None:
    batch = ("training.batch_size=8", "training.local_epochs=1")
    scenario = resolved(tiny, "protocol=fedavg", OF_ITEMS.replace("12", "20"), *batch)
    found = affordable_tasks(scenario, [frozenset({Delta, Loss})], [8, 80], 50)
    assert found is not None and 0 < found[8] < found[80] < 50
    for items, tasks in found.items():
        inside, above = (item_epsilon(scenario, items, n, n / 4, 1e-5) for n in (tasks, tasks + 1))
        assert inside <= 20 < above


def test_a_budget_of_many_numbers_of_items_takes_few_compositions(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 100: a task of 101 items has more steps than one of 100, so fewer tasks are within the budget."""
    scenario = resolved(tiny, "protocol=fedavg", OF_ITEMS, "training.batch_size=100", "training.local_epochs=1")
    kinds, asked = [frozenset({Delta})], list[int]()

    def counting(*given: Any) -> float:
        asked.append(given[1])
        return item_epsilon(*given)

    monkeypatch.setattr("fedmq.federation.noise.item_epsilon", counting)
    found = affordable_tasks(scenario, kinds, range(90, 130), 30)
    assert found is not None and found[100] > found[101]
    assert len(asked) < 30
    for n, tasks in found.items():
        assert item_epsilon(scenario, n, tasks, 0, 1e-5) <= 12 < item_epsilon(scenario, n, tasks + 1, 0, 1e-5)


NOISE = "clip_norm: 1.0, noise_multiplier: 1.0"
#: FedAvg sends an update and a loss; two replies spend epsilon 10.0 at delta 1e-5, three 12.9
BUDGET = f"privacy={{{NOISE}, statistics: {{loss: {{{NOISE}}}}}, budget: {{epsilon: 12}}}}"
#: For single items, with noise in local steps instead of noise on the update. In one step a task that takes all items,
#: each spends as much as a silo above: replacing an item moves sum and loss by up to twice the norm.
OF_ITEMS = (
    "privacy={items: {group: 4, clip_norm: 0.1, noise_multiplier: 2}, "
    "statistics: {loss: {clip_norm: 1.0, noise_multiplier: 2}}, budget: {epsilon: 12}}"
)
ONE_STEP = ("training.batch_size=100", "training.local_epochs=1")
SETTINGS = ("protocol={name: fedavg, single_modality: idle}", "missing_modality={}", "participation=0.5", "rounds=20")
#: Four silos with two tasks each, merged in pairs, or one by one.
VERSIONS = {"sync": 4, "async": 8}


@pytest.mark.parametrize(("mode", "budget"), [("sync", BUDGET), ("async", BUDGET), ("sync", OF_ITEMS)])
def test_a_run_ends_when_all_silos_have_spent_their_budgets(tiny: Path, tmp_path: Path, mode: str, budget: str) -> None:
    settings = (*SETTINGS, f"aggregation.mode={mode}", budget, *ONE_STEP)
    whole = in_process_run.run(resolved(tiny, *settings), tmp_path / "whole").summary
    assert whole is not None
    assert (whole.ended_by, whole.versions) == ("privacy.budget", VERSIONS[mode])
    crash = "faults=[{kind: coordinator_crash, after_round: 2}]"
    killed = in_process_run.run_restarted(resolved(tiny, *settings, crash), tmp_path / "killed").summary
    assert killed is not None
    assert killed.model_digest == whole.model_digest


def silo_01(scenario: Path, settings: tuple[str, ...], uri: str, keys: Path, out: Path, *, dies: bool) -> None:
    """A silo in a process of its own, which is killed in its second task or runs to the end."""
    respond = ReadySilo.respond

    def killed(ready: ReadySilo, message: Message) -> tuple[Payload, ...]:
        if message.header.kind is Kind.TASK and message.header.base_version == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return respond(ready, message)

    if dies:
        ReadySilo.respond = killed  # type: ignore[method-assign]
    run_silo(SiloArguments(run_of(resolved(scenario, *settings)), "silo-01", uri, keys, out))


@pytest.mark.parametrize("budget", [BUDGET, OF_ITEMS])
def test_a_silo_refuses_the_task_that_would_pass_its_budget_whatever_the_coordinator_asks_also_after_kill_9(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    """The coordinator goes on asking silo-01, which is killed in the second of its two tasks and started again."""
    selectable = RoundsPlan.selectable
    monkeypatch.setattr(RoundsPlan, "selectable", lambda plan, tasks: {*selectable(plan, tasks), "silo-01"})
    settings = (
        "protocol={name: fedavg, single_modality: idle}",
        "missing_modality={}",
        "participation=1.0",
        "rounds=4",
        budget,
        *ONE_STEP,
    )
    scenario, log = resolved(tiny, *settings), RunFolder(tmp_path).messages("silo-01")

    def killed_and_restarted(uri: str, keys: Path) -> None:
        for exit_code in (-signal.SIGKILL, 0):
            options = {"dies": bool(exit_code)}
            process = CONTEXT.Process(target=silo_01, args=(tiny, settings, uri, keys, tmp_path), kwargs=options)
            process.start()
            process.join(PATIENCE)
            assert process.exitcode == exit_code

    warm_up("features")
    others = [name for name in scenario.silo_names if name != "silo-01"]
    with private_folder() as folder:
        uri = f"ipc://{folder}/coordinator"
        summary = run(scenario, tmp_path, uri=uri, silos=others, others=[killed_and_restarted]).summary
    assert summary is not None
    assert (summary.ended_by, summary.versions) == (None, 4)
    assert sum(isinstance(each, StartRecord) for _, each in read_log(log)) == 2
    (tmp_path / "scenario.yaml").write_text(scenario.dump())
    accounts = account(tmp_path, audit_run(tmp_path), 1e-5)
    silos = accounts.items or accounts.silos
    assert {one.updates for one in silos.values()} == {2}
    assert all(9 < one.epsilon <= 12 for one in silos.values())
    assert silos["silo-01"].beside == ("data_statement", "error")


def test_options_that_the_methods_payloads_cannot_keep_are_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    for settings, words in (
        (
            ("privacy.statistics={geometry: {clip_norm: 1}}",),
            r"privacy\.statistics: found 'geometry', allowed: .*delta, loss",
        ),
        (
            (f"privacy={{{NOISE}, budget: {{epsilon: 9}}}}",),
            r"statistics\.loss\.noise_multiplier: found 0, allowed: above 0",
        ),
        (
            ("privacy.budget={epsilon: 9}",),
            r"privacy\.noise_multiplier: found 0.*fedavg send delta, loss in .*; likewise statistics\.loss\.noise_mult",
        ),
        (
            ("privacy.budget={epsilon: 9}", "protocol={name: rcsr, router_at: silos}"),
            r"whose silos send router_sums, to which no noise.*allowed: null, or another method or other options",
        ),
        (
            (OF_ITEMS, "privacy.statistics.loss.noise_multiplier=0"),
            r"statistics\.loss\.noise_multiplier: found 0.* send loss in each reply$",
        ),
        (
            (OF_ITEMS, "privacy.items.noise_multiplier=0"),
            r"privacy\.budget needs privacy\.items\.noise_multiplier above",
        ),
        (
            (OF_ITEMS, "privacy.secure_aggregation=true"),
            r"privacy\.budget with privacy\.items needs privacy\.secure_aggregation null",
        ),
        ((OF_ITEMS.replace("12", "1"),), r"at least \d+\.?\d*, which one reply of a silo with \d+ training items"),
        ((BUDGET.replace("12", "1"),), r"privacy\.budget\.epsilon: found 1.*allowed: at least 6.57"),
        ((BUDGET, "aggregation.mode=buffered"), "sync or async"),
        ((BUDGET, "protocol=fednova"), r"privacy\.budget: found 'with fednova, whose silos send local_steps"),
    ):
        with pytest.raises(InputError, match=words):
            in_process_run.run(
                resolved(tiny, "protocol={name: fedavg, single_modality: idle}", "missing_modality={}", *settings),
                tmp_path,
            )
    with pytest.raises(InputError, match=r"privacy\.least_support: found 99, allowed: at most"):
        in_process_run.run(resolved(tiny, "privacy.least_support=99"), tmp_path)
