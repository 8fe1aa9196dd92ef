"""Query bank against hubness: its effect on similarities, and its path from a merge into a release."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedmq.config.scenario import Objective
from fedmq.data.prepare import prepare
from fedmq.errors import InputError, RemoteWireError
from fedmq.evaluation.heldout import HeldOut, embed, load_inference
from fedmq.evaluation.metrics import Measured, measure
from fedmq.federation.population import build_population
from fedmq.federation.protocol import encoders_of
from fedmq.models.query_bank import MORE, STRENGTH, TEMPERATURE, Bank, hubness
from fedmq.retrieval.gallery import export
from fedmq.retrieval.released_model import open_release
from fedmq.runs.results import read_metrics
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.payloads import ClassPrototypes
from tests import in_process_run
from tests.small_federation import DIM, SmallFederation, population
from tests.threaded_run import resolved

NOW = {"warmup": 0.0, "support": 2, "centroids": 3}


def unit(*shape: int, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def some_bank(dim: int = 8) -> Bank:
    counts = torch.tensor([1.0, 4.0, 9.0])
    return Bank(unit(3, dim, seed=5), counts, unit(2, dim, seed=6), counts[1:])


def test_hubness_is_the_log_mean_exp_over_all_samples_behind_the_centroids() -> None:
    z, centroids, counts = unit(4, 8), unit(3, 8, seed=1), torch.tensor([1.0, 2.0, 3.0])
    every = np.repeat((z @ centroids.T).double().numpy(), [1, 2, 3], axis=1)
    wanted = TEMPERATURE * np.log(np.exp(every / TEMPERATURE).mean(1))
    np.testing.assert_allclose(hubness(z, centroids, counts), wanted, atol=1e-6)


def test_extended_vectors_have_unit_length_and_score_as_in_the_formula() -> None:
    bank, image, text = some_bank(), unit(6, 8, seed=2), unit(7, 8, seed=3)
    x, y = bank.images(image), bank.texts(text)
    assert x.shape == (6, 8 + MORE)
    assert y.shape == (7, 8 + MORE)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(6))
    torch.testing.assert_close(y.norm(dim=1), torch.ones(7))
    mine = hubness(image, bank.text, bank.text_counts), hubness(text, bank.image, bank.image_counts)
    scores = image @ text.T - STRENGTH * mine[0][:, None] - STRENGTH * mine[1][None]
    torch.testing.assert_close(x @ y.T * (2 + STRENGTH**2), scores)


def released(bank: str) -> tuple[SmallFederation, ClassPrototypes]:
    run = population("fedbridge", {**NOW, "bank": bank})
    assert run.protocol.release(run.state) == ()
    run.round()
    (payload,) = run.protocol.release(run.state)
    assert isinstance(payload, ClassPrototypes)
    return run, payload


def test_a_bank_holds_the_centroids_of_all_silos_or_of_paired_ones() -> None:
    run, every = released("all")
    counts = run.state.tensors["centroid_counts"]  # [silos, 2, 3]; of the four silos the second and third lack one
    half = len(every.counts) // 2
    assert every.counts[:half].sum() == counts[:, 0].sum()
    assert every.counts[half:].sum() == counts[:, 1].sum()
    _, paired = released("paired")
    half = len(paired.counts) // 2
    assert paired.counts[:half].sum() == counts[[0, 3], 0].sum() < counts[:, 0].sum()
    assert paired.counts[half:].sum() == counts[[0, 3], 1].sum() < counts[:, 1].sum()


def test_a_model_drops_its_bank_when_a_release_without_one_is_loaded() -> None:
    run, payload = released("all")
    model = run.state.model(run.context.layout)
    load_inference(run.model, (model, payload))
    assert run.model.image(unit(2, DIM)).shape == (2, DIM + MORE)
    load_inference(run.model, (model,))
    assert run.model.image(unit(2, DIM)).shape == (2, DIM)


def test_a_bank_that_does_not_fit_is_refused() -> None:
    run, payload = released("all")
    model = run.state.model(run.context.layout)
    rows, counts = np.asarray(payload.prototypes), np.asarray(payload.counts)
    half = len(counts) // 2
    wrong = {
        "columns": ClassPrototypes(rows[:, 1:].copy(), counts, "both"),
        "odd": ClassPrototypes(rows[1:].copy(), counts[1:].copy(), "both"),
        "no text": ClassPrototypes(rows, np.where(np.arange(len(counts)) < half, counts, 0), "both"),
    }
    for name, bad in wrong.items():
        with pytest.raises(RemoteWireError, match="a query bank of shape"):
            load_inference(run.model, (model, bad))
        assert run.model.bank is None, name
    hashing = population("fedhap", objective=Objective(base="csq", bits=DIM))
    with pytest.raises(RemoteWireError, match="a query bank of shape"):
        load_inference(hashing.model, (hashing.state.model(hashing.context.layout), payload))


def test_a_release_retrieves_as_the_evaluator_measured_and_the_bank_does_not_change_training(
    tiny: Path, tmp_path: Path
) -> None:
    digests, measured = [], []
    for bank in ("none", "all"):
        scenario = resolved(tiny, f"protocol={{name: fedbridge, warmup: 0, bank: {bank}}}")
        in_process_run.run(scenario, tmp_path / bank)
        folder = RunFolder(tmp_path / bank)
        digests.append(json.loads(folder.summary.read_text())["model_digest"])
        measured.append(read_metrics(folder)[-1].metrics)
    assert digests[0] == digests[1]
    assert measured[0] != measured[1]
    release = open_release(tmp_path / "all")
    prepared = prepare(release.scenario.data, release.scenario.backbone)
    share = HeldOut.load(release.scenario, build_population(release.scenario)).dataset
    again = measure(
        Measured(embed(encoders_of(release.model(prepared)), share, binary=False), release.scenario.evaluation)
    )
    assert {name: again[name] for name in ("mean_r1", "mean_r10")} == {
        name: measured[1][name] for name in ("mean_r1", "mean_r10")
    }
    made = export(release)
    assert made.meta.dim == made.array("image").shape[1] == release.files.config.dim + MORE

    path = tmp_path / "all" / "model" / "class_prototypes.safetensors"
    arrays = load_file(path)
    save_file({**arrays, "prototypes": arrays["prototypes"][:, :-1].clone()}, path)
    with pytest.raises(InputError, match=r"a query bank with digest .* the run's own"):
        release.model(prepared)
    save_file({"counts": arrays["counts"]}, path)
    with pytest.raises(InputError, match=r"class_prototypes\.safetensors"):
        release.model(prepared)
