"""Attacks on what silos really sent: they recognise memorised items, and not those behind noise or a secure sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import leakage
from fedmq.audit.membership_inference import members_of
from fedmq.audit.payload_attacks import PayloadProbe, _Attacks, _modalities, _sent, probe_payloads, show
from fedmq.audit.shadow_silos import Sent, Shadows, whole_change
from fedmq.errors import InputError
from fedmq.federation.population import build_population
from fedmq.retrieval.released_model import open_release
from fedmq.runs.captured_payloads import read_captured
from fedmq.storage.run_folder import RunFolder, load_aligned
from silos.tasks import Silo
from tests import in_process_run
from tests.test_audit_membership_inference import finished, noise_scenario
from tests.threaded_run import resolved, run


def probed(
    tmp_path: Path, *, rounds: int = 4, privacy: Mapping[str, object], shadows: int = 4, **more: object
) -> PayloadProbe:
    scenario = noise_scenario(tmp_path, rounds=rounds, privacy={"capture": True, **privacy}, **more)
    return probe_payloads(finished(scenario, tmp_path / "run"), shadows=shadows)


def test_what_is_captured_is_what_the_silos_sent_and_the_model_that_they_were_sent(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform, sent = Silo.transform, dict[tuple[str, int, str], object]()

    def watched(silo: Silo, payload: object, task: object, *, idle: bool = False) -> object:
        after = transform(silo, payload, task, idle=idle)  # type: ignore[arg-type]
        sent[silo.facts.name, task.base_version, after.KIND] = after  # type: ignore[attr-defined]
        return after

    monkeypatch.setattr(Silo, "transform", watched)
    in_process_run.run(resolved(tiny, "privacy={capture: true, clip_norm: 0.1}"), tmp_path)
    found = list(read_captured(RunFolder(tmp_path)))
    assert [each.version for each in found] == [0, 1, 2, 3]
    whole = {kind: 0 for _, _, kind in sent}
    for each in found:
        for silo, payloads in each.silos.items():
            for kind, fields in payloads.items():
                original = sent.get((silo, each.version, kind))
                for name, value in fields.items() if original is not None else ():
                    assert np.array_equal(value, getattr(original, name)), (silo, kind, name)
                whole[kind] = whole.get(kind, 0) + (original is not None)
    assert whole["delta"] and whole["geometry"] and whole["loss"] and whole["modality_prototypes"]
    last = load_aligned(RunFolder(tmp_path).captured / "version-000003.safetensors")["model"]
    assert not torch.equal(last, found[0].state.theta)


def test_the_attacks_recognise_memorised_items_in_updates_and_not_behind_noise(tmp_path: Path) -> None:
    clear = {attack.name: attack.result for attack in probed(tmp_path, privacy={}).attacks if attack.payload == "delta"}
    assert clear.keys() == {"cosine", "difference", "gradient", "shadows"}
    for name in ("difference", "gradient", "shadows"):
        low = clear[name].auc.low
        assert low is not None and low > 0.7, name
    (tmp_path / "noisy").mkdir()
    noisy = probed(tmp_path / "noisy", privacy={"clip_norm": 0.1, "noise_multiplier": 4.0})
    for attack in noisy.attacks:
        if attack.name in ("difference", "gradient", "shadows"):
            assert attack.result.auc.low is not None and attack.result.auc.low < 0.5, attack.name
    assert ("an update or its report", 1.0) in {(one.payload, one.found) for one in noisy.inferences}
    console = Console(record=True, width=120)
    show(noisy, console)
    assert "shows the number of training items: right for 100% of 2" in console.export_text()
    show(PayloadProbe(1, (), (), ()), console)
    text = console.export_text()
    assert "no captured payload of a silo has a membership test" in text and "AUC ┃" not in text


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("protocol={name: fedhap}", "objective={base: triplet, bits: 8, hidden: 16}"),
        ("protocol={name: fedbridge}",),
        ("protocol={name: fedper}",),
    ],
    ids=["rcsr", "fedhap", "fedbridge", "personal layers"],
)
def test_a_shadow_with_the_silos_items_and_draws_sends_what_the_silo_sent(
    tiny: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    noise = "privacy={capture: true, clip_norm: 0.1, noise_multiplier: 0.1}"
    scenario = resolved(tiny, *settings, noise, "participation=1.0", "rounds=2", "evaluation.every=0")
    in_process_run.run(scenario, tmp_path)
    population = build_population(scenario)
    model = population.build_model(scenario, "cpu", ("image", "text"))
    shadows = Shadows(scenario, population, model)
    last = dict[str, Sent]()
    for captured in read_captured(RunFolder(tmp_path)):
        for silo in members_of(scenario, population):
            name = silo.silo.name
            before = last.get(name) if shadows.personal else None
            sent = Sent(captured.state, captured.version, captured.silos[name], captured.layers.get(name), before)
            again = shadows.update(silo.silo, silo.rows, sent, sequence=captured.version + 1).change
            kind = "delta" if sent.layers is None else "partial_delta"
            assert torch.equal(again, whole_change(model, sent.payloads[kind]["buffer"], sent.layers)), (name, kind)
            last[name] = sent


def test_an_update_of_one_step_of_sgd_holds_its_inputs(tmp_path: Path) -> None:
    sgd = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.1, "warmup_rounds": 0}
    scenario = noise_scenario(tmp_path, training=sgd)
    population = build_population(scenario)
    model = population.build_model(scenario, "cpu", ("image", "text"))
    shadows = Shadows(scenario, population, model)
    sent = Sent(shadows.method.initial(model.initial()), 0, {}, None)
    found = [each for silo in members_of(scenario, population) for each in shadows.inverted(silo, sent)]
    assert {each.batch for each in found} == {2, 4, 8}, "a contrast needs two items"
    for each in found:
        assert each.items.mean() > 0.85 and each.items.min() > each.others.max(), (each.modality, each.batch)


@pytest.mark.parametrize("owner", [0, 1])
def test_the_item_nearest_to_a_row_of_a_class_is_told_to_be_the_silos_or_not(tiny: Path, owner: int) -> None:
    scenario = resolved(tiny, "protocol=fedavg", "missing_modality={}")
    population = build_population(scenario)
    attacks = _Attacks(scenario, population, population.build_model(scenario, "cpu", ("image", "text")), 0)
    members = {each.silo.name: each for each in members_of(scenario, population)}
    labels, row = np.asarray(population.prepared.labels), members[f"silo-0{owner}"].trained[0]
    sent = Sent(attacks._shadows.method.initial(attacks._model.initial()), 0, {}, None)
    rows = np.zeros((5, attacks._model.dim), np.float32)
    (label,) = np.flatnonzero(labels[row])
    rows[label] = np.sum(attacks._embedded(sent, sent.state.theta, row[None]), axis=0)[0]
    payload = {"prototypes": rows, "counts": np.arange(5) == label}
    (found,) = attacks.nearest(members, {"silo-00": replace(sent, payloads={"class_prototypes": payload})})
    assert (found.found, found.count) == (1.0 - owner, 1) and found.chance is not None and 0 < found.chance < 1


def test_with_a_secure_sum_there_is_no_update_to_attack(tiny: Path, tmp_path: Path) -> None:
    secure = "privacy={capture: true, secure_aggregation: {max_weight: 1.0, min_contributors: 1.0}}"
    scenario = resolved(tiny, "participation=1.0", "rounds=2", "evaluation.every=0", secure)
    (tmp_path / "scenario.yaml").write_text(scenario.dump())
    run(scenario, tmp_path)
    measured = probe_payloads(open_release(tmp_path))
    assert {attack.payload for attack in measured.attacks} == {"modality_prototypes"}
    exact = {one.payload: one.found for one in measured.inferences if one.what == "the number of training items"}
    assert exact == {"an update or its report": 1.0, "geometry": 1.0}, "the length of an update divided by sqrt(n)"
    held = [(one.payload, one.found, one.count) for one in measured.inferences if "modalities" in one.what]
    assert held == [("an update or its report", 1.0, 4), ("modality_prototypes", 1.0, 4)]


def test_an_update_shows_by_its_branches_which_modality_a_silo_lacks(tiny: Path, tmp_path: Path) -> None:
    settings = (
        "privacy={capture: true, clip_norm: 0.1, noise_multiplier: 4.0}",
        "missing_modality.silos={silo-01: image}",
    )
    scenario = resolved(tiny, "protocol=fedavg", "participation=1.0", "rounds=2", "evaluation.every=0", *settings)
    in_process_run.run(scenario, tmp_path)
    *_, captured = read_captured(RunFolder(tmp_path))
    population = build_population(scenario)
    members = {each.silo.name: each for each in members_of(scenario, population)}
    model = population.build_model(scenario, "cpu", ("image", "text"))
    last = {name: _sent(captured, name, None) for name in members}
    by_update, by_prototypes = _modalities(last, members, model)
    assert by_update.found == by_prototypes.found == 1.0 and by_update.chance == 0.75
    lacking = members["silo-01"]
    wrong = {"silo-01": replace(lacking, silo=replace(lacking.silo, image=False, text=True))}
    assert [each.found for each in _modalities(last, wrong, model)] == [0.0, 0.0]


def test_a_run_without_captured_payloads_and_a_damaged_file_are_refused_by_name(tmp_path: Path) -> None:
    release = finished(noise_scenario(tmp_path, rounds=1, privacy={"capture": True}), tmp_path / "run")
    (path,) = release.run.captured.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"version-000000\.safetensors: found .*, allowed: a file as the run wrote it"):
        probe_payloads(release)
    path.unlink()
    with pytest.raises(InputError, match=r"captured: found .*no captured payloads"):
        probe_payloads(release)


@pytest.mark.slow
def test_the_benchmark_of_leakage_attacks_what_silos_sent_and_its_tables_have_the_rows_with_values(tiny: Path) -> None:
    values = leakage.probed(str(tiny), "fedavg", "clipped updates", seed=0)
    rows = {"one: clipped": [values, values], "other: nothing sent": [{"quality": 0.5}]}
    for name, columns in leakage.TABLES.items():
        grid = leakage.table(columns, rows)
        assert [row[0].text for row in grid.body] == ([] if name == "leakage_rows" else ["one: clipped"]), name
    (row,) = leakage.table(leakage.TABLES["leakage_updates"], rows).body
    assert all(0.0 <= float(cell.text.partition(" ± ")[0]) <= 1.0 for cell in row[2:])
