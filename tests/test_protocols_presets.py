"""Presets of the seed methods: what each sets, and that a scenario's own lines come first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import protocols
from fedmq.config.plug_ins import parsed
from fedmq.config.resolve import ResolvedRun, read, resolve
from fedmq.config.scenario import Backbone, Training
from fedmq.config.sections import Aggregation
from fedmq.errors import InputError
from fedmq.models.objective_registry import OBJECTIVES

SEEDS = ("fedcafe", "fedhap", "fedscmr", "feduch", "rcsr")
BASES = {
    "fedcafe": {"base": "dcmh"},
    "fedhap": {"base": "triplet"},
    "fedscmr": {"base": "dscmr", "enhance": True},
    "feduch": {"base": "dgcpn"},
    "rcsr": {"base": "info_nce"},
}
PRESETS = [(name, preset) for name in SEEDS for preset in protocols.load(name).Options.PRESETS]
#: What the paper prints of RCSR: algorithm 1, eqs 2 to 11 and table 3.
RCSR = {
    **{"tau": 0.07, "lambda_anc": 1.0, "lambda_a": 0.1, "lambda_s": 0.01, "warmup": 20, "ema": 0.9, "filler": "ema"},
    **{"beta1": 1.0, "beta2": 1.0, "beta4": 0.2, "beta5": 0.3, "router_rate": 1e-3, "router_warmup_rate": 0.0},
    **{"masked_pc": True, "masked_ac": False, "masked_ema": False, "proto_unit": False, "branch_renorm": False},
    **{"fair_eta": 0.1, "fair_ema": 0.9, "fair_update": "paper", "fair_center": False, "router_losses": "raw"},
    **{"router": True, "minimax": True, "client_align": True, "anchor": True, "router_over": "reporters"},
    **{"eq9_half": False, "router_softplus": False},
}


def resolved(folder: Path, protocol: Mapping[str, object], *settings: str, **sections: object) -> ResolvedRun:
    """A scenario that gives these sections alone."""
    given = {"name": "preset", "protocol": dict(protocol), "objective": BASES[str(protocol["name"])]}
    usual = {"data": {"name": "openmoji"}, "partition": {"kind": "iid"}}
    (folder / "scenario.yaml").write_text(yaml.safe_dump({**given, **usual, **sections}))
    return resolve(read(folder / "scenario.yaml", settings), protocols)


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_preset_shows_its_values_in_the_resolved_scenario_and_warns_of_nothing(
    name: str, preset: str, tmp_path: Path
) -> None:
    run = resolved(tmp_path, {"name": name, "preset": preset})
    shown = run.scenario.model_dump(mode="json")
    for key, value in protocols.load(name).Options.PRESETS[preset].items():
        *section, leaf = key.split(".")
        assert shown[section[0] if section else "protocol"][leaf] == value, key
    assert not run.warnings
    (tmp_path / "again.yaml").write_text(run.scenario.dump())
    again = resolve(read(tmp_path / "again.yaml"), protocols)
    assert again.scenario == run.scenario


@pytest.mark.parametrize("name", SEEDS)
def test_without_a_preset_every_option_has_its_default(name: str, tmp_path: Path) -> None:
    run, options = resolved(tmp_path, {"name": name}), protocols.load(name).Options
    assert run.scenario.protocol.options == protocols.as_plain(options())
    assert run.scenario.training == Training()


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_preset_names_options_and_keys_that_exist(name: str, preset: str) -> None:
    options = protocols.load(name).Options
    for key in options.PRESETS[preset]:
        *section, leaf = key.split(".")
        base = section[1] if len(section) > 1 else str(BASES[name]["base"])
        of_base = {field.name for field in dataclasses.fields(OBJECTIVES.find(base).options)}
        known = {"": vars(options()), "objective": of_base, "training": Training.model_fields}
        sections = {"backbone": Backbone.model_fields, "aggregation": Aggregation.model_fields}
        assert leaf in {**known, **sections}[section[0] if section else ""], key


def test_lines_of_the_scenario_come_before_a_preset(tmp_path: Path) -> None:
    chosen = {"name": "fedcafe", "preset": "released", "kl": "normalised"}
    training = {"learning_rate": 0.5, "batch_size": 7}
    run = resolved(tmp_path, chosen, "objective.draws=permutation", "training.batch_size=9", training=training)
    assert (run.scenario.protocol.options["kl"], run.scenario.protocol.options["memory"]) == (
        "normalised",
        "kmeans_random",
    )
    assert run.scenario.training.learning_rate == 0.5
    assert run.scenario.training.batch_size == 9
    assert run.scenario.training.optimizer == "sgd"
    assert run.scenario.objective.options["draws"] == "permutation"
    assert run.scenario.objective.options["scale"] == "silos"


def test_a_preset_leaves_out_options_that_the_base_does_not_have(tmp_path: Path) -> None:
    run = resolved(tmp_path, {"name": "feduch", "preset": "printed"}, objective={"base": "djsrh"})
    assert "form" not in run.scenario.objective.options
    assert run.scenario.training.local_epochs == 5


@pytest.mark.parametrize(("base", "eta"), [("dcmh", 1.0), ("shdch", 100.0)])
def test_a_preset_sets_an_option_of_one_base_alone(base: str, eta: float, tmp_path: Path) -> None:
    run = resolved(tmp_path, {"name": "fedcafe", "preset": "printed"}, objective={"base": base})
    assert run.scenario.objective.options["eta"] == eta


@pytest.mark.parametrize(("name", "preset"), [("fedcafe", "released"), ("fedhap", "printed"), ("feduch", "released")])
def test_rates_stay_constant_where_neither_paper_nor_code_has_a_schedule(
    name: str, preset: str, tmp_path: Path
) -> None:
    training = resolved(tmp_path, {"name": name, "preset": preset}).scenario.training
    assert (training.schedule, training.warmup_rounds) == ("constant", 0)


def test_the_printed_preset_of_rcsr_has_the_papers_table_and_equations(tmp_path: Path) -> None:
    run = resolved(tmp_path, {"name": "rcsr", "preset": "printed"})
    options, training = run.scenario.protocol.options, run.scenario.training
    assert {name: options[name] for name in RCSR} == RCSR
    assert (training.optimizer, training.schedule) == ("adamw", "cosine")
    assert (training.learning_rate, training.weight_decay, training.warmup_rounds) == (1e-4, 0.01, 5)
    assert (training.batch_size, training.local_epochs) == (128, 1)
    assert (run.scenario.backbone.head, run.scenario.backbone.bottleneck) == ("mlp", 64)


@pytest.mark.parametrize(("name", "preset"), [("fedhap", "released"), ("rcsr", "mine"), ("rcsr", ["printed"])])
def test_an_unknown_preset_is_refused_with_the_known_ones(name: str, preset: Any) -> None:
    with pytest.raises(InputError, match=r"protocol\.preset: found .* allowed: .*printed.*ours"):
        parsed(protocols.load(name).Options, {"preset": preset}, "protocol")


def test_a_preset_that_does_not_fit_the_scenario_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = protocols.load("feduch").Options
    monkeypatch.setitem(options.PRESETS, "ours", {"training.warmup_rounds": 10})
    with pytest.raises(InputError, match=r"scenario\.yaml.*protocol\.preset: found 'ours'.*warmup_rounds \(10\)"):
        resolved(tmp_path, {"name": "feduch", "preset": "ours"}, rounds=6)
