"""``fedmq scenario --check`` warns of settings without effect: it repeats the first rounds without them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

import protocols
from fedmq.cli import main as cli
from fedmq.config.resolve import read, resolve
from fedmq.federation.population import build_population
from fedmq.launch.rehearsal import Finding, check_warnings

pytestmark = pytest.mark.slow


def found(file: Path, *settings: str, merges: int = 2, most: int = 1000) -> Mapping[Finding, list[str]]:
    """The warnings of a scenario in which all silos train in each round, by what they are about."""
    run = resolve(read(file, ("participation=1", *settings)), protocols)
    population = build_population(run.scenario, pooled=run.pooled)
    made = list(check_warnings(run, population, merges, most=most))
    return {each: [warning.text for warning in made if warning.finding is each] for each in Finding}


SINGLE, SEVERAL = "training.batch_size=128", "training.batch_size=4"


def test_fedprox_is_fedavg_if_tasks_are_single_steps(tiny: Path) -> None:
    single = found(tiny, "protocol={name: fedprox, mu: 0.5}", SINGLE)
    (equal,) = single[Finding.EQUALS_FEDAVG]
    assert equal.startswith("fedprox is FedAvg here: after 2 rounds") and equal.endswith("is bit-identical to FedAvg's")
    assert single[Finding.OPTION_WITHOUT_EFFECT] == [
        "protocol.mu: 0.5 has no effect in the first 2 rounds: with 0 they are bit-identical"
    ]
    assert len(single[Finding.ONE_STEP_TASKS]) == 1
    assert not any(found(tiny, "protocol={name: fedprox, mu: 0.5}", SEVERAL).values())


def test_a_method_whose_model_is_within_a_thousandth_of_fedavgs_is_nearly_fedavg(tiny: Path) -> None:
    def equal(mu: float) -> list[str]:
        # Adam would give parameters whose only gradient is that of the proximal term the same steps whatever mu is.
        sgd = ("training.optimizer=sgd", "training.learning_rate=0.05", SEVERAL)
        return list(found(tiny, f"protocol={{name: fedprox, mu: {mu}}}", *sgd)[Finding.EQUALS_FEDAVG])

    (line,) = equal(1e-3)
    assert line.startswith("fedprox is nearly FedAvg here") and line.endswith(
        "of FedAvg's distance to the initial model"
    )
    assert equal(1) == []


def test_scaffold_and_fednova_are_not_called_fedavg_where_a_slow_check_sees_one_merge_or_even_silos(tiny: Path) -> None:
    assert found(tiny, "protocol=scaffold", SEVERAL, merges=1)[Finding.EQUALS_FEDAVG] == []
    nova = ("protocol=fednova", "partition.sizes=proportional", "training.batch_size=2")
    whole, part = (found(tiny, *nova, most=most) for most in (1000, 4))
    assert whole[Finding.EQUALS_FEDAVG] == part[Finding.EQUALS_FEDAVG] == whole[Finding.NOT_COMPARED] == []
    assert "all silos take the same number of steps" in part[Finding.NOT_COMPARED][0]


def test_of_several_options_only_those_without_effect_are_named(tiny: Path) -> None:
    method = "protocol={name: rcsr, lambda_s: 0.1, lambda_a: 0.3, warmup: 1, lambda_p: 0.4, ema: 0.5}"
    single, several = (found(tiny, method, batch)[Finding.OPTION_WITHOUT_EFFECT] for batch in (SINGLE, SEVERAL))
    assert [line.partition(":")[0] for line in single] == ["protocol.lambda_s"]
    assert several == []


def test_parts_that_begin_later_are_switched_on_for_the_comparison(tiny: Path) -> None:
    """With its warm-up of 3 rounds, RCSR without its own losses averages as FedAvg does in the first two."""
    alone = "client_align: false, lambda_s: 0, minimax: false"
    assert found(tiny, f"protocol={{name: rcsr, {alone}, warmup: 3}}")[Finding.EQUALS_FEDAVG] == []
    assert found(tiny, f"protocol={{name: rcsr, {alone}, router: false}}")[Finding.EQUALS_FEDAVG] != []


def test_what_is_personal_or_takes_long_is_not_compared_with_fedavg(tiny: Path) -> None:
    assert found(tiny, "protocol=local", SEVERAL)[Finding.EQUALS_FEDAVG] == []
    (line,) = found(tiny, SEVERAL, merges=0)[Finding.NOT_COMPARED]
    assert "a task takes too long" in line


def test_a_personal_option_has_an_effect_by_the_silos_states(tiny: Path) -> None:
    method = "protocol={name: rcsr, personal: fixed, personal_onset: 1, personal_rate: 0.2, warmup: 1}"
    assert found(tiny, method, SEVERAL)[Finding.OPTION_WITHOUT_EFFECT] == []


def test_the_check_prints_its_warnings_and_has_them_as_json(tiny: Path) -> None:
    given = ["scenario", str(tiny), "--check", "--quiet", "--set", "protocol={name: fedprox, mu: 0.5}"]
    printed = CliRunner().invoke(cli.app, given)
    assert "warning: fedprox is FedAvg here" in printed.stdout and "warning: every task is one" in printed.stdout
    plain = json.loads(CliRunner().invoke(cli.app, [*given, "--json"]).stdout)
    assert [each["finding"] for each in plain["warnings"]] == [
        "one_step_tasks",
        "equals_fedavg",
        "option_without_effect",
    ]
    quiet = json.loads(CliRunner().invoke(cli.app, [*given, "--json", "--set", SEVERAL]).stdout)
    assert quiet["warnings"] == []


def test_groups_larger_than_a_silo_and_sums_of_two_silos_are_warned_of(tiny: Path) -> None:
    two = ("silos.count=2", "missing_modality={}")
    for settings, words in (
        (
            ("protocol=fedavg", "privacy.items={group: 40, clip_norm: 1}"),
            "40 is more than the training items of silo-00",
        ),
        (("protocol=fedavg", "privacy.items={group: 20, clip_norm: 1}"), None),
        (("protocol={name: rcsr, router_at: silos}", *two), "a round has two silos, and each can subtract its own"),
        (("protocol=fedavg", "privacy.secure_aggregation=true", *two), "a round has two silos"),
        (("protocol=fedavg", "privacy.secure_aggregation=true"), None),
        (("protocol=rcsr", *two), None),
    ):
        lines = found(tiny, *settings, merges=0)[Finding.LITTLE_PRIVACY]
        assert words in lines[0] if words else not lines, settings
