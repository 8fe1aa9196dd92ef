"""Released models for other programs: ONNX files that compute the same, and folders for the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedmq
from fedmq.config import resolve as scenarios
from fedmq.config.sections import Modality
from fedmq.encoders.base import InputSpec
from fedmq.errors import RunError
from fedmq.models.build import build
from fedmq.retrieval import model_export
from fedmq.retrieval.released_model import described, open_model
from tests import command_line
from tests.test_data_extract import tiny_clip
from tests.threaded_run import run

pytestmark = pytest.mark.slow

SETTINGS = {
    "embeddings": ["protocol=fedavg"],
    "codes": ["protocol=fedavg", "objective={base: dcmh, bits: 16, hidden: 16}"],
    "a query bank": ["protocol={name: fedbridge, warmup: 0, bank: all}"],
}


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders of short runs, by what is special about them."""
    found = {}
    for what, settings in SETTINGS.items():
        root = tmp_path_factory.mktemp("run") / "run"
        short = ["rounds=1", "training.warmup_rounds=0", "participation=1.0", *settings]
        run(scenarios.load(tiny, short), root)
        found[what] = root / "model"
    return found


def export(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    return command_line.fedmq(monkeypatch, "export", *arguments)


@pytest.mark.parametrize("what", ["embeddings", "codes", "a query bank"])
def test_onnxruntime_computes_what_the_model_computes(what: str, models: dict[str, Path], tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    files = open_model(models[what])
    written = model_export.export_onnx(files, tmp_path / "onnx")
    assert [each.path.name for each in written] == ["image.onnx", "text.onnx"]
    assert max(each.difference for each in written) <= 1e-5
    towers = files.alone()
    inputs, _ = described(files)
    x = np.random.default_rng(0).normal(size=(7, *inputs.image_shape)).astype(np.float32)
    session = runtime.InferenceSession(str(written[0].path))
    import torch

    with torch.inference_mode():
        expected = towers.encoders.image(torch.from_numpy(x)).numpy()
    (found,) = session.run(None, {"x": x})
    assert np.abs(found - expected).max() <= 1e-5
    assert session.get_outputs()[0].name == ("code" if towers.binary else "embedding")
    about = session.get_modelmeta().custom_metadata_map
    assert about["fedmq.model_digest"] == files.config.model_digest


def test_an_export_that_computes_something_else_is_refused_and_leaves_nothing(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(model_export, "PARITY", -1.0)
    with pytest.raises(RunError, match="more than -1"):
        model_export.export_onnx(open_model(models["embeddings"]), tmp_path / "onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_the_hub_has_a_card_that_the_hub_reads_and_loads_again(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("onnxruntime")
    source = Path(shutil.copytree(models["a query bank"], tmp_path / "model"))
    (source / "gallery").mkdir()
    (source / "gallery" / "private.json").write_text("names of photos")
    folder = tmp_path / "hub"
    assert export(monkeypatch, source, "--hub", folder, "--onnx", folder / "onnx", "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert set(facts["files"]) == {"README.md", "config.json", "model.safetensors", "class_prototypes.safetensors"}
    assert sorted(path.name for path in (folder / "onnx").iterdir()) == ["image.onnx", "text.onnx"]
    said = "hold the trained part only. Their inputs are feature vectors"
    card = hub.ModelCard.load(folder / "README.md")
    assert said in facts["onnx_contents"]
    assert said in card.text
    assert card.data.library_name == "fedmq"
    assert card.data.pipeline_tag == "feature-extraction"
    measured = {each.metric_type: each.metric_value for each in card.data.eval_results}
    assert 0 <= measured["mean_r1"] <= 1
    assert "## Limits" in card.text
    assert fedmq.load(folder).config == fedmq.load(source).config


def test_a_path_of_this_machine_is_not_exported(models: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(models["embeddings"], tmp_path / "model"))
    files = open_model(source)
    backbone = {**files.config.backbone, "pretrained": "/home/me/weights.pt", "text_encoder": "/home/me/sentences"}
    moved = replace(files, config=files.config.model_copy(update={"backbone": backbone}))
    model_export._fill_hub(tmp_path, moved, [])
    written = json.loads((tmp_path / "config.json").read_text())["backbone"]
    assert (written["pretrained"], written["text_encoder"]) == ("weights.pt", "sentences")


def test_exports_that_are_not_possible_are_refused_in_one_line(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = models["embeddings"]
    for arguments, words in (
        (("--hub", tmp_path), "found 'a folder that exists'"),
        (("--onnx", tmp_path), "found 'a folder that exists'"),
        (("--onnx", tmp_path / "o", "--silo", "silo-00"), "no such option with --onnx or --hub"),
        (("--onnx", tmp_path / "o", "--gallery", tmp_path), "no such option with --onnx or --hub"),
    ):
        assert export(monkeypatch, source, *arguments) == 2
        error = capfd.readouterr().err
        assert words in error
        assert len(error.splitlines()) == 1
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"cut")
    assert export(monkeypatch, tmp_path / "model", "--hub", tmp_path / "hub") == 2
    assert "model.safetensors" in capfd.readouterr().err
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize(("modality", "adapter"), [("image", "lora"), ("text", "bottleneck"), ("text", "lora")])
def test_a_tower_with_adapters_in_its_blocks_is_exported_with_its_frozen_encoder(
    modality: Modality, adapter: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    backbone = tiny_clip(tmp_path, adapter_site="blocks", head="mlp", adapter=adapter)
    inputs = InputSpec((3, 32, 32), (20,), "uint8", "int32", (0.5,) * 3, (0.2,) * 3)
    model = build(backbone, inputs, 0, modalities=(modality,), cache=tmp_path)
    tower, path = model_export._Tower(model, modality).eval(), tmp_path / "tower.onnx"
    model_export._write_tower(tower, inputs, path)
    assert model_export._difference(tower, path, inputs) <= 1e-5
