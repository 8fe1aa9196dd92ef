"""Choice of a finished run's model: the shared one, or a personal one, which must be the model its silo evaluated."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.data.prepare import prepare
from fedmq.errors import InputError
from fedmq.evaluation import recall
from fedmq.evaluation.heldout import HeldOut
from fedmq.federation.population import build_population
from fedmq.launch.released_runs import open_run_model
from fedmq.retrieval import plots, search
from fedmq.retrieval.gallery import export
from fedmq.retrieval.released_model import Release, open_release
from fedmq.runs.release import OtherModelError
from tests import in_process_run
from tests.command_line import fedmq
from tests.threaded_run import resolved

pytestmark = pytest.mark.slow

DSCMR = "objective={base: dscmr, bits: 12, hidden: 16, leaky: true}"
#: Methods whose shared model cannot be used for retrieval, with their settings.
ONLY = {
    "local": ("protocol=local",),
    "fedproto": ("protocol=fedproto",),
    "fedper": ("protocol=fedper",),
    "pfedmma": ("protocol=pfedmma", "backbone.adapter=mma"),
    "fedsalora": ("protocol=fedsalora", "backbone.adapter=lora"),
    "fedcmr": ("protocol=fedcmr", DSCMR),
    "fedscmr": ("protocol=fedscmr", "objective={base: dscmr, bits: 12, hidden: 16, enhance: true}"),
}
#: Methods with personal models next to a usable shared one.
BESIDE = {
    "rcsr": ("protocol={name: rcsr, personal: router, personal_onset: 1, personal_rate: 1.0, warmup: 1}",),
    "fedbridge": ("protocol={name: fedbridge, personal: true, personal_onset: 1, warmup: 0, bank: all}",),
    "moon": ("protocol={name: moon, personal: true}",),
    "plfedcmh": ("protocol=plfedcmh", "objective={base: shdch, bits: 12, hidden: 16}"),
}
PAIRED = "silo-01"


def finished(tiny: Path, out: Path, *settings: str) -> Path:
    scenario = resolved(tiny, "evaluation.within=true", "evaluation.gallery=database", *settings)
    in_process_run.run(scenario, out)
    return out


@pytest.fixture(scope="module")
def local(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose shared model is never trained; read-only."""
    return finished(tiny, tmp_path_factory.mktemp("serving") / "local", "protocol=local", "participation=1")


@pytest.fixture(scope="module")
def adapted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of RCSR-p; read-only."""
    return finished(tiny, tmp_path_factory.mktemp("serving") / "rcsr", *BESIDE["rcsr"], "participation=1")


def opened(root: Path, silo: str | None = None) -> Release:
    return open_run_model(root, "cpu", silo)


def summary_of(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "summary.json").read_text())
    return found


def state_of(root: Path, silo: str) -> Path:
    return max((root / "checkpoints" / "silos" / silo).glob("task-*.safetensors"))


def test_the_diagonal_of_the_cross_site_matrix_is_what_the_silos_measured(
    adapted: Path, local: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedmq(monkeypatch, "cross", adapted, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"] == found["silos"] and not found["without_model"]
    told = summary_of(adapted)["personal_per_silo"]
    values = np.array(found["values"])
    assert values.diagonal().tolist() == [told[silo]["mean_r1"] for silo in found["silos"]]
    assert found["own"] == pytest.approx(values.diagonal().mean())
    assert found["others"] == pytest.approx(values[~np.eye(len(values), dtype=bool)].mean())
    # A silo's row, weighted by items, is its model's value on the whole split.
    whole = summary_of(adapted)["personal_whole_split"][PAIRED]["i2t_r1"]
    assert fedmq(monkeypatch, "cross", adapted, "--metric", "i2t_r1", "--json") == 0
    row = json.loads(capsys.readouterr().out)["values"][found["models"].index(PAIRED)]
    assert np.average(row, weights=found["items"]) == pytest.approx(whole)
    assert fedmq(monkeypatch, "cross", local, "--metric", "nothing") == 2
    assert "mean_r1" in capsys.readouterr().err
    assert fedmq(monkeypatch, "cross", local, "--json") == 0  # only silos that trained both towers have a model
    assert json.loads(capsys.readouterr().out)["without_model"]


def as_the_silo_measured(root: Path, silo: str) -> Release:
    """A silo's personal model, whose metrics equal those in the run's summary to the bit."""
    release = opened(root, silo)
    assert release.own is not None
    model, told = release.own.retriever, summary_of(root)
    heldout = HeldOut.load(release.scenario, build_population(release.scenario))
    found = heldout.measured(model.encoders, binary=model.binary, names=(silo,))
    assert dict(found.values) == told["personal_whole_split"][silo]
    assert dict(found.per_silo[silo]) == told["personal_per_silo"][silo]
    return release


@pytest.mark.slow
@pytest.mark.parametrize("method", ["local", "fedper", "pfedmma", "fedscmr", "rcsr", "fedbridge", "plfedcmh"])
def test_the_personal_model_is_the_one_that_the_silo_evaluated(method: str, tiny: Path, tmp_path: Path) -> None:
    settings = {**ONLY, **BESIDE}[method]
    root = finished(tiny, tmp_path / "run", "participation=1", *settings)
    told = summary_of(root)["personal_whole_split"][PAIRED]
    release = as_the_silo_measured(root, PAIRED)
    for way, each in plots.measured(release, (1,)).items():
        assert each.map == pytest.approx(told[f"map_{way}"], abs=1e-12)

    made = export(release)
    assert made.folder.name.startswith(f"data-{PAIRED}-")
    if not made.binary:
        rows = prepare(release.scenario.data, release.scenario.backbone).rows("test")
        owner = made.array("owner")
        captions = np.isin(owner, rows)
        own = recall.recalls(
            made.array("image")[rows], made.array("text")[captions], np.searchsorted(rows, owner[captions])
        )
        assert own == {name: pytest.approx(told[name], abs=1e-12) for name in own}

    if method in ONLY:
        with pytest.raises(InputError, match=f"a shared model that {method} trains in part.*--silo NAME"):
            opened(root)
    else:
        assert export(opened(root)).folder != made.folder
        for silo in ("silo-02", "silo-03"):  # which lack a modality and use its shared tower
            as_the_silo_measured(root, silo)


@pytest.mark.slow
def test_a_personal_model_uses_only_the_state_of_the_last_merged_task(tiny: Path, tmp_path: Path) -> None:
    """Asynchronous runs end with pending tasks, whose states are in the folder as well."""
    modes = ("aggregation.mode=async", "rounds=7", "participation=0.5", "cost.preset=edge")
    for name in ("fedper", "moon"):
        root = finished(tiny, tmp_path / name, *{**ONLY, **BESIDE}[name], *modes)
        told = summary_of(root)
        both = [silo for silo in ("silo-00", "silo-01") if told["per_silo"][silo]["participations"]]
        assert both
        for silo in both:
            as_the_silo_measured(root, silo)


def test_an_untrained_shared_model_is_refused_and_a_personal_one_is_not(local: Path) -> None:
    with pytest.raises(InputError) as refused:
        opened(local)
    assert str(refused.value) == (
        f"{local}: found 'a shared model that local trains in part or not at all', "
        "allowed: --silo NAME (silo-00 to silo-03): silos of local have personal models"
    )
    as_the_silo_measured(local, PAIRED)


def test_a_usable_shared_model_is_selected_without_naming_a_silo(adapted: Path) -> None:
    release = opened(adapted)
    assert release.own is None and release.used == open_release(adapted).used
    assert as_the_silo_measured(adapted, PAIRED).used != release.used


def test_a_silo_without_a_trained_personal_model_is_refused_with_those_that_have_one(
    local: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(local, tmp_path / "run")
    told = summary_of(root)
    told["per_silo"][PAIRED]["participations"] = 0
    (root / "summary.json").write_text(json.dumps(told))
    both = "a silo that trained both towers: silo-00, silo-01"
    for run, silo, words in (
        (local, "silo-9", "found 'silo-9', allowed: silo-00, silo-01, silo-02, silo-03$"),
        (local, "silo-02", f"which has no captions', allowed: {both}$"),
        (local, "silo-03", f"which has no images', allowed: {both}$"),
        (root, PAIRED, "which took part in no round', allowed: .*: silo-00$"),
    ):
        with pytest.raises(InputError, match=f"^--silo: .*{words}"):
            opened(run, silo)


@pytest.mark.parametrize("settings", [("protocol=fedavg",), ("protocol=moon",)], ids=["fedavg", "moon"])
def test_a_silo_is_refused_for_a_method_without_personal_models(
    tiny: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    root = finished(tiny, tmp_path / "run", "rounds=2", "training.warmup_rounds=0", *settings)
    with pytest.raises(InputError, match="no personal model of silo-01', allowed: the shared model: with this run"):
        opened(root, PAIRED)
    assert opened(root).own is None


@pytest.mark.parametrize("run", ["local", "adapted"])
def test_a_missing_personal_state_is_named(run: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    root = shutil.copytree(request.getfixturevalue(run), tmp_path / "run")
    path = state_of(root, PAIRED)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match=f"^{path}: found 'a damaged personal state"):
        opened(root, PAIRED)
    shutil.rmtree(path.parent)
    with pytest.raises(InputError, match=f"^{path}: found 'no such file', allowed: the personal state"):
        opened(root, PAIRED)


@pytest.mark.parametrize(
    "protocol", ["{name: rcsr, personal: router, ", "{name: fedbridge, bank: all, personal: true, "]
)
def test_a_silo_without_an_adapter_uses_the_shared_model(protocol: str, tiny: Path, tmp_path: Path) -> None:
    settings = ("rounds=2", "training.warmup_rounds=0", "participation=1")
    root = finished(tiny, tmp_path / "run", f"protocol={protocol} personal_onset: 9, warmup: 0}}", *settings)
    # No stored state is needed yet. FedBridge's shared model also has a bank, which personal models lack.
    shutil.rmtree(root / "checkpoints" / "silos")
    as_the_silo_measured(root, PAIRED)


def test_a_missing_or_foreign_checkpoint_is_named(local: Path, adapted: Path, tmp_path: Path) -> None:
    root = shutil.copytree(local, tmp_path / "run")
    for name in ("summary.json", "model/config.json"):
        told = json.loads((root / name).read_text())
        (root / name).write_text(json.dumps({**told, "model_digest": "0" * 64}))
    with pytest.raises(OtherModelError, match="version-000004: found 'a model with digest"):
        opened(root, PAIRED)
    for path in (root / "checkpoints").glob("version-*"):
        shutil.rmtree(path)
    with pytest.raises(InputError, match=f"^{root}/checkpoints: found 'no checkpoint'"):
        opened(root, PAIRED)


def test_silos_have_separate_galleries(local: Path) -> None:
    one, other = (export(opened(local, silo)) for silo in ("silo-00", "silo-01"))
    assert one.folder != other.folder
    assert (one.meta.silo, other.meta.silo) == ("silo-00", "silo-01")
    assert not np.array_equal(one.array("image"), other.array("image"))
    assert export(opened(local, "silo-00")).folder == one.folder
    found = search.find(opened(local, "silo-00"), search.Query(item="000007"), among="images", top=1)
    assert found.gallery.folder == one.folder and found.hits[0].item == "000007"


def test_the_commands_accept_a_silo(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = summary_of(local)["personal_whole_split"][PAIRED]
    for command in (("search", local, "--item", "000007"), ("export", local), ("curves", local)):
        assert fedmq(monkeypatch, *command) == 2
        assert "--silo NAME (silo-00 to silo-03)" in capfd.readouterr().err
        assert fedmq(monkeypatch, command[0], "--help") == 0
        shown = " ".join(capfd.readouterr().out.replace("│", " ").split())
        assert "--silo silo-03" in shown and "this silo's personal model" in shown
    assert fedmq(monkeypatch, "search", local, "--item", "000007", "--silo", PAIRED, "--json") == 0
    assert f"data-{PAIRED}-" in json.loads(capfd.readouterr().out)["gallery"]
    assert fedmq(monkeypatch, "export", local, "--silo", PAIRED, "--json") == 0
    assert json.loads(capfd.readouterr().out)["silo"] == PAIRED
    assert fedmq(monkeypatch, "curves", local, "--silo", PAIRED, "--out", tmp_path, "--json") == 0
    maps = json.loads(capfd.readouterr().out)["runs"][f"local {PAIRED}"]
    assert maps == {f"map_{way}": pytest.approx(told[f"map_{way}"], abs=1e-12) for way in ("i2t", "t2i", "i2i", "t2t")}
    assert {row["run"] for row in csv.DictReader((tmp_path / "curves.csv").open())} == {f"local {PAIRED}"}
