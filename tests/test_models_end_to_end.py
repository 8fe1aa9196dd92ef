"""Hash networks that also train their image encoder: DCMH and similar bases end to end from a .mat file's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedmq.config import resolve as scenarios
from fedmq.config.scenario import Scenario
from fedmq.data.prepare import prepare
from fedmq.errors import InputError
from fedmq.federation.population import build_population
from fedmq.models.two_tower import TwoTower
from fedmq.retrieval.gallery import export
from fedmq.retrieval.released_model import open_release
from fedmq.storage.cache import cache_folder
from fedmq.storage.run_folder import load_aligned
from tests import data_set_folders, in_process_run
from tests.threaded_run import resolved

pytest.importorskip("scipy.io")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scenario on twenty photos where half of the silos have no images."""
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "end.yaml"
    path.write_text(
        f"""name: end
rounds: 2
protocol: fedavg
data: {{name: mirflickr, path: {data_set_folders.mirflickr(tmp_path / "set", 20)}, queries: 4, val: 2, train: 13}}
backbone: {{name: matconvnet, pretrained: {data_set_folders.matconvnet(tmp_path / "f.mat")}, end_to_end: true}}
objective: {{base: dcmh, bits: 8, hidden: 16}}
silos: {{count: 3}}
partition: {{kind: iid}}
missing_modality: {{silos: {{silo-01: text}}}}
training: {{batch_size: 4, warmup_rounds: 1}}
evaluation: {{every: 0, gallery: database}}
launcher: inline
"""
    )
    return path


def model_of(scenario: Scenario) -> TwoTower:
    return build_population(scenario).build_model(scenario, "cpu", ("image", "text"))


def images(scenario: Scenario) -> torch.Tensor:
    return torch.tensor(np.array(prepare(scenario.data, scenario.backbone).image))


@pytest.mark.slow
@pytest.mark.parametrize("base", ["dcmh", "greedyhash"])
def test_an_untrained_end_to_end_network_equals_the_one_over_frozen_features(file: Path, base: str) -> None:
    scenario = scenarios.load(file, [f"objective.base={base}"])
    frozen = scenarios.load(file, [f"objective.base={base}", "backbone.end_to_end=false"])
    shown = images(scenario)
    assert shown.dtype == torch.uint8
    whole, above = model_of(scenario), model_of(frozen)
    with torch.no_grad():
        torch.testing.assert_close(whole.image(shown), above.image(images(frozen)), rtol=1e-4, atol=1e-5)
    assert {entry.name for entry in whole.layout.entries} - {entry.name for entry in above.layout.entries} == {
        f"visual.encoder.{layer}.{part}" for layer in (0, 4, 6) for part in ("weight", "bias")
    }


def test_another_weight_file_gives_another_run_over_the_same_pixels(file: Path, tmp_path: Path) -> None:
    scenario = scenarios.load(file)
    first = prepare(scenario.data, scenario.backbone)
    data_set_folders.matconvnet(tmp_path / "f.mat", old=True)
    second = prepare(scenario.data, scenario.backbone)
    assert first.digest != second.digest
    assert (first.folder / "image.npy").samefile(second.folder / "image.npy")


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["fedcafe", "moon"])
def test_a_run_trains_the_encoder_and_its_release_searches_images(file: Path, tmp_path: Path, protocol: str) -> None:
    scenario = scenarios.load(file, [f"protocol={protocol}"])
    begun = model_of(scenario)
    in_process_run.run(scenario, tmp_path / "run")
    trained = load_aligned(tmp_path / "run" / "model" / "model.safetensors")
    for name, view in begun.layout.views(begun.flat.detach().numpy()).items():
        if name.startswith("visual.encoder."):
            assert not np.array_equal(trained[name].numpy(), view), name
    release = open_release(tmp_path / "run")
    found = export(release, tmp_path / "set" / "mirflickr")
    assert len(found.items.keys) == 21  # a plain folder of images


def test_a_silo_without_images_leaves_the_encoder_unchanged(file: Path, tmp_path: Path) -> None:
    scenario = scenarios.load(file, ["missing_modality={rate: 1, only: text}"])
    begun = model_of(scenario)
    in_process_run.run(scenario, tmp_path / "run")
    trained = load_aligned(tmp_path / "run" / "model" / "model.safetensors")
    for name, view in begun.layout.views(begun.flat.detach().numpy()).items():
        if name.startswith("visual."):
            assert np.array_equal(trained[name].numpy(), view), name


def test_end_to_end_training_is_refused_for_other_backbones_and_bases(file: Path) -> None:
    for settings, message in (
        (["backbone.name=lite", "backbone.pretrained=null"], r"end_to_end needs backbone\.name matconvnet, not lite"),
        (["objective=dgcpn"], r"end_to_end is for hash networks on labels, not objective\.base dgcpn"),
        (["objective=info_nce"], r"end_to_end is for hash networks on labels, not objective\.base info_nce"),
        (["objective=dscmr"], r"end_to_end is for hash networks on labels, not objective\.base dscmr"),
    ):
        with pytest.raises(InputError, match=message):
            resolved(file, *settings)


def test_features_in_place_of_images_are_refused(file: Path, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)
    np.savez(tmp_path / "f.npz", image=rows, text=rows, labels=np.arange(12) % 2)
    setting = f"data={{name: features, path: {tmp_path / 'f.npz'}}}"
    with pytest.raises(InputError, match=r"backbone\.name"):
        build_population(scenarios.load(file, [setting]), cache=cache_folder())
