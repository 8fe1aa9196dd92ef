"""The membership-inference probe: can the training items of a released model be distinguished from held-out items?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rich.console import Console
from safetensors.torch import load_file, save_file

import protocols
from fedmq.audit import membership_inference
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.retrieval import gallery, plots
from fedmq.retrieval.released_model import Release, open_release
from fedmq.runs.release import OtherModelError
from tests import in_process_run, threaded_run
from tests.command_line import completed, printed

pytestmark = pytest.mark.slow

# Few distinct values, so that ties occur.
VALUES = arrays.arrays(np.float64, st.integers(1, 40), elements=st.integers(-6, 6).map(float))


# -------------------------------------------------------------------------------------------------------- statistics
@given(VALUES, VALUES)
@settings(max_examples=30)
def test_the_true_positive_rate_and_the_components_fit_the_roc_curve(members: np.ndarray, others: np.ndarray) -> None:
    from sklearn.metrics import roc_curve

    truth = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    below, above = membership_inference.components(members, others)
    area = membership_inference.area(members, others)
    assert (below.mean(), above.mean()) == pytest.approx((area, area))
    false, true, _ = roc_curve(truth, np.concatenate([members, others]), drop_intermediate=False)
    assert membership_inference.true_positives(members, others) == pytest.approx(
        true[false <= membership_inference.FALSE_POSITIVES].max()
    )


@given(VALUES, VALUES)
@settings(max_examples=30)
def test_the_confidence_interval_is_that_of_delong_over_all_pairs(members: np.ndarray, others: np.ndarray) -> None:
    found = membership_inference.estimate(
        membership_inference.area(members, others), membership_inference.components(members, others), 0.0
    )
    if found.low is None or found.high is None:
        assert min(len(members), len(others)) < 2 or np.ptp(membership_inference.components(members, others)[0]) == 0
        return
    pairs = np.heaviside(members[:, None] - others[None, :], 0.5)
    variance = pairs.mean(1).var(ddof=1) / len(members) + pairs.mean(0).var(ddof=1) / len(others)
    half = 1.959963984540054 * np.sqrt(variance)
    ends = max(0, pairs.mean() - half), min(1, pairs.mean() + half)
    # Near 0 the difference has few significant digits.
    assert (found.low, found.high) == pytest.approx(ends, rel=1e-5, abs=1e-9)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_the_auc_difference_of_two_models_on_the_same_items_has_a_narrower_interval_than_the_auc() -> None:
    generator = np.random.default_rng(0)
    before = generator.normal(size=200), generator.normal(size=100)
    after = before[0] + 0.3 + 0.1 * generator.normal(size=200), before[1]
    found = membership_inference.compared(after, before, ("image",), trained=True)
    assert None not in (found.auc.low, found.auc.high, found.added.low, found.added.high)
    assert found.added.value == pytest.approx(found.auc.value - found.untrained)
    assert found.added.low > 0
    assert found.added.high - found.added.low < (found.auc.high - found.auc.low) / 2


def test_a_score_is_the_cosine_of_the_pair_minus_the_mean_cosine_with_all_others() -> None:
    generator = np.random.default_rng(1)
    image, text = generator.normal(size=(2, 7, 5)).astype(np.float32)
    x, y = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (image, text))
    cosines = x @ y.T
    for item, score in enumerate(membership_inference.scores(image, text)):
        others = np.delete(np.arange(7), item)
        expected = cosines[item, item] - (cosines[item, others].mean() + cosines[others, item].mean()) / 2
        assert score == pytest.approx(expected, abs=1e-6)
    assert np.allclose(membership_inference.scores(3 * image, text), membership_inference.scores(image, text))


# --------------------------------------------------------------------------------------------------------- whole runs
def noise_scenario(tmp_path: Path, **more: object) -> Scenario:
    """A scenario whose images and captions are independent noise, so that a model can only memorise its items."""
    generator = np.random.default_rng(2)
    path = tmp_path / "noise.npz"
    np.savez(
        path,
        **{name: generator.normal(size=(140, 24)).astype(np.float32) for name in ("image", "text")},
        split=np.array(["train"] * 80 + ["test"] * 60),
    )
    file = tmp_path / "noise.yaml"
    content = {
        "name": "noise",
        "rounds": 10,
        "protocol": "fedavg",
        "data": {"name": "features", "path": str(path)},
        "backbone": {"name": "features", "bottleneck": 64},
        "silos": {"count": 2},
        "partition": {"kind": "iid"},
        "training": {"learning_rate": 0.01, "warmup_rounds": 1, "local_epochs": 5},
        "evaluation": {"every": 0},
        "launcher": "inline",
        **more,
    }
    file.write_text(yaml.safe_dump(content))
    return threaded_run.resolved(file)


def finished(scenario: Scenario, out: Path) -> Release:
    out.mkdir()
    (out / "scenario.yaml").write_text(scenario.dump())
    in_process_run.run(scenario, out)
    return open_release(out)


def test_the_probe_detects_a_model_that_memorised_its_items(tmp_path: Path) -> None:
    measured = membership_inference.probe(finished(noise_scenario(tmp_path), tmp_path / "run"))
    assert (measured.overall.members, measured.overall.others) == (80, 60)
    assert measured.overall.auc.value > 0.9
    assert measured.overall.tpr.low is not None and measured.overall.tpr.low > 0.3
    assert measured.overall.added.low is not None and measured.overall.added.low > 0.2
    assert all(found.auc.value > 0.8 for found in measured.per_silo.values())
    assert sum(found.members for found in measured.per_silo.values()) == 80


def test_the_probe_finds_no_leak_in_a_barely_trained_model(tmp_path: Path) -> None:
    hardly = {"learning_rate": 1e-7, "warmup_rounds": 0, "local_epochs": 1}
    measured = membership_inference.probe(
        finished(noise_scenario(tmp_path, rounds=1, training=hardly), tmp_path / "run")
    )
    assert measured.overall.auc.low is not None and measured.overall.auc.high is not None
    assert measured.overall.auc.low < 0.5 < measured.overall.auc.high
    assert measured.overall.added.value == pytest.approx(0, abs=0.05)


def test_items_of_a_silo_that_did_not_train_are_not_members(tmp_path: Path) -> None:
    scenario = noise_scenario(tmp_path, protocol="paired_only", missing_modality={"silos": {"silo-01": "image"}})
    measured = membership_inference.probe(finished(scenario, tmp_path / "run"))
    one, other = measured.per_silo["silo-00"], measured.per_silo["silo-01"]
    assert (one.trained, other.trained, other.modalities) == (True, False, ("image",))
    assert measured.overall.members == one.members < 80
    assert one.auc.value > 0.8
    assert other.auc.low is not None and other.auc.high is not None
    assert other.auc.low < 0.5 < other.auc.high
    console = Console(record=True, width=120)
    membership_inference.show(measured, console)
    assert "silo-01, image, took no part" in console.export_text()


def test_pairs_that_the_scenario_holds_out_of_training_are_not_members(tmp_path: Path) -> None:
    training = {"learning_rate": 0.01, "warmup_rounds": 1, "local_epochs": 5, "validation": 0.25}
    measured = membership_inference.probe(finished(noise_scenario(tmp_path, training=training), tmp_path / "run"))
    assert measured.overall.members == 60


def test_pooled_data_are_probed_as_a_single_data_set(tmp_path: Path) -> None:
    scenario = noise_scenario(tmp_path, protocol="central")
    measured = membership_inference.probe(
        finished(scenario, tmp_path / "run"), pooled=protocols.traits_of(scenario).pooled
    )
    assert measured.overall.members == 80
    assert measured.overall.auc.value > 0.8
    assert not measured.per_silo


def test_a_probe_without_the_data_of_the_run_is_an_input_error(tmp_path: Path) -> None:
    release = finished(noise_scenario(tmp_path, rounds=1), tmp_path / "run")
    (tmp_path / "noise.npz").unlink()
    with pytest.raises(InputError, match=r"--probe .*noise\.npz.*the run's data on this machine"):
        membership_inference.probe(release)


@pytest.mark.slow
def test_other_data_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    release = finished(noise_scenario(tmp_path, rounds=1), tmp_path / "run")
    path = tmp_path / "noise.npz"
    with np.load(path) as whole:
        there = dict(whole)
    np.savez(path, **{**there, "image": -there["image"]})
    for use in (membership_inference.probe, gallery.export, lambda opened: plots.measured(opened, (1,))):
        with pytest.raises(InputError, match=r"run: the data: found 'data of other content than the run was made with"):
            use(release)
    np.savez(path, **there)
    assert membership_inference.probe(release).overall.members == 80


def test_a_release_swapped_together_with_its_configuration_is_not_opened(tmp_path: Path) -> None:
    own, other = (finished(noise_scenario(tmp_path, rounds=1, seed=seed), tmp_path / f"run{seed}") for seed in (0, 1))
    shutil.rmtree(own.run.model)
    shutil.copytree(other.run.model, own.run.model)
    with pytest.raises(OtherModelError, match=r"model/config\.json: found 'a model with digest"):
        open_release(own.run.root)
    own.run.summary.unlink()  # a release copied without its summary
    assert open_release(own.run.root).used == other.used


# -------------------------------------------------------------------------------------------------- the command line
@pytest.fixture(scope="module")
def run_of_rcsr_p(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of RCSR-p with its message logs."""
    out = tmp_path_factory.mktemp("probe") / "run"
    scenario = threaded_run.resolved(tiny, "protocol={name: rcsr, warmup: 1, personal: router, personal_onset: 1}")
    threaded_run.run(scenario, out)
    (out / "scenario.yaml").write_text(scenario.dump())
    return out


@pytest.mark.slow
def test_the_command_probes_and_exits_with_0(run_of_rcsr_p: Path) -> None:
    facts = json.loads(printed("audit", run_of_rcsr_p, "--probe", "--json"))["probe"]
    assert facts["personal"]
    assert facts["digest"] == json.loads((run_of_rcsr_p / "summary.json").read_text())["model_digest"]
    assert (facts["overall"]["members"], facts["overall"]["others"]) == (100, 30)
    assert set(facts["per_silo"]) == {"silo-00", "silo-01", "silo-02", "silo-03"}
    for found in (facts["overall"], *facts["per_silo"].values()):
        assert 0 <= found["auc"]["value"] <= 1
        assert 0 <= found["tpr"]["low"] <= found["tpr"]["value"] <= found["tpr"]["high"] <= 1
    shown = " ".join(printed("audit", run_of_rcsr_p, "--probe").split())
    assert "0.5 is guessing" in shown
    assert "the personal parameters of the silos are not tested" in shown


def test_a_probe_of_broken_logs_exits_with_3(run_of_rcsr_p: Path, tmp_path: Path) -> None:
    assert not {"probe", "policy"} & set(json.loads(printed("audit", run_of_rcsr_p, "--json")))
    shutil.copytree(run_of_rcsr_p, tmp_path / "run")
    log = tmp_path / "run" / "messages" / "silo-00.jsonl"
    first, _, *rest = log.read_text().splitlines(keepends=True)
    log.write_text("".join([first, *rest]))
    printed("audit", tmp_path / "run", "--probe", "--json", code=3)


def test_an_impossible_probe_does_not_hide_the_findings_of_the_audit(run_of_rcsr_p: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(run_of_rcsr_p, root)
    shutil.rmtree(root / "model")
    told = completed("audit", root, "--probe", "--json")
    facts = json.loads(told.stdout)
    assert told.returncode == 3
    places = {str(root / "model" / name) for name in ("README.md", "config.json", "model.safetensors")}
    assert {finding["place"] for finding in facts["findings"]} == places
    assert "no released model in it" in facts["error"] and "no released model in it" in told.stderr
    assert "3 differences" in printed("audit", root, "--delta", "1e-5", code=3)


def test_a_swapped_model_is_a_finding_and_is_not_probed(run_of_rcsr_p: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(run_of_rcsr_p, root)
    path, config = root / "model" / "model.safetensors", root / "model" / "config.json"
    save_file({name: -tensor for name, tensor in load_file(path).items()}, path)
    own = json.loads((root / "summary.json").read_text())["model_digest"]
    for place in (path, config):
        facts = json.loads(printed("audit", root, "--probe", "--json", code=3))
        places = [finding["place"] for finding in facts["findings"]]
        assert places[0] == str(place)
        assert facts["findings"][0]["what"].endswith(f"instead of the run's own, with digest {own}")
        assert len(set(places)) == len(places)  # a finding of both the audit and the probe is reported once
        assert (facts["ok"], "probe" in facts) == (False, False)
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_digest": "cd" * 32}))
    printed("audit", root, code=3)  # found without the probe too


def test_a_real_run_of_rcsr_p_complies_with_the_policy_of_the_docs(run_of_rcsr_p: Path) -> None:
    shipped = Path(__file__).parent.parent / "docs" / "policies" / "rcsr_p.yaml"
    facts = json.loads(printed("audit", run_of_rcsr_p, "--policy", shipped, "--json"))["policy"]
    assert (facts["ok"], facts["broken"], facts["not_held"]) == (True, [], 0)
    assert facts["checked"] > 30
