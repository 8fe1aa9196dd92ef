"""Whole runs over silos whose items may lack a modality."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.federation.population import build_population
from fedmq.federation.protocol import SiloFacts
from tests import in_process_run
from tests.small_federation import ADAPTERS, OBJECTIVES, population
from tests.threaded_run import resolved

pytestmark = pytest.mark.slow

SILOS, N = 3, 90
SPLIT = np.array(["train"] * 60 + ["test"] * 24 + ["public"] * 6)
SITE = np.array([f"site-{row % SILOS}" for row in range(N)])
BASE = ("rounds=2", f"silos.count={SILOS}", "participation=1.0", "missing_modality={}", "training.batch_size=8")
BY_SITE = (*BASE, "partition={kind: column, column: site}")
#: A method of each kind of training; the variants of FedAvg leave these items out where it does.
METHODS = ("central", "creamfl_public", "fedavg", "fedcafe", "fedhap", "fedproto", "mfcpl", "plfedcmh")
#: Of the training items of the mixed sites: every fifth has no captions, every seventh no image.
NO_TEXT = (np.arange(N) % 5 == 3) & (np.arange(N) < 60)
NO_IMAGE = (np.arange(N) % 7 == 4) & (np.arange(N) < 60) & ~NO_TEXT


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a features file of some items, some of which lack a modality."""
    generator, folder, counter = np.random.default_rng(7), tmp_path_factory.mktemp("unpaired"), iter(range(1000))
    latent = generator.normal(size=(N, 16))
    image, text = (latent + 0.5 * generator.normal(size=(N, 16)) for _ in range(2))
    image, text = ((each / np.linalg.norm(each, axis=1, keepdims=True)).astype(np.float32) for each in (image, text))
    labels = np.eye(4, dtype=np.uint8)[latent[:, :4].argmax(axis=1)]

    def write(no_image: Any = None, no_text: Any = None, rows: Any = slice(None)) -> Path:
        path, more = folder / f"{next(counter)}.npz", {}
        images, words = image.copy(), text.copy()
        for name, lacking, values in (("image", no_image, images), ("text", no_text, words)):
            if lacking is not None:
                values[lacking] = np.nan
                more[f"{name}_present"] = ~lacking[rows]
        np.savez(path, image=images[rows], text=words[rows], labels=labels[rows], split=SPLIT[rows], site=SITE[rows],
                 keys=np.array([f"item-{row:03d}" for row in range(N)])[rows], **more)  # fmt: skip
        return path

    return write


def run(tiny: Path, out: Path, data: Path, *settings: str) -> dict[str, Any]:
    scenario = resolved(tiny, f"data.path={data}", *settings)
    result = in_process_run.run(scenario, out).summary
    assert result is not None
    return result.plain()


def of_method(name: str) -> tuple[str, ...]:
    """Settings under which a method can run on the features."""
    objective = OBJECTIVES.get(name)
    adapter = (f"backbone.adapter={ADAPTERS[name]}",) if name in ADAPTERS else ()
    chosen = () if objective is None else (f"objective={json.dumps(objective.model_dump(mode='json'))}",)
    return (f"protocol={{name: {name}}}", *chosen, *adapter)


@pytest.mark.parametrize(("name", "modality"), [("rcsr", "image"), ("fedavg", "text")])
def test_a_silo_whose_items_all_lack_a_modality_is_bit_identical_to_one_without_it(
    name: str, modality: str, tiny: Path, tmp_path: Path, written: Callable[..., Path]
) -> None:
    lacking = (SITE == "site-1") & (SPLIT == "train")
    absent = {"no_text": lacking} if modality == "image" else {"no_image": lacking}
    whole = run(
        tiny,
        tmp_path / "silo",
        written(),
        *BY_SITE,
        *of_method(name),
        f"missing_modality={{silos: {{silo-01: {modality}}}}}",
    )
    items = run(tiny, tmp_path / "item", written(**absent), *BY_SITE, *of_method(name))
    assert items["model_digest"] == whole["model_digest"]
    assert items["per_silo"] == whole["per_silo"]
    assert items["per_silo"]["silo-01"]["modalities"] == [modality]


def test_a_method_that_ignores_unpaired_items_trains_as_if_they_did_not_exist(
    tiny: Path, tmp_path: Path, written: Callable[..., Path]
) -> None:
    """Same model, same bytes, and the count is reported for each silo."""
    mixed, without = written(NO_IMAGE, NO_TEXT), written(rows=np.flatnonzero(~(NO_IMAGE | NO_TEXT)))
    counts = {f"silo-{site:02d}": int(((NO_IMAGE | NO_TEXT) & (f"site-{site}" == SITE)).sum()) for site in range(SILOS)}
    for name in METHODS:
        traits = population(name).protocol.traits()
        assert traits.unpaired == "ignored"
        settings = (*BY_SITE, "rounds=1", *of_method(name))
        found = run(tiny, tmp_path / f"{name}-mixed", mixed, *settings)
        other = run(tiny, tmp_path / f"{name}-without", without, *settings)
        assert found["model_digest"] == other["model_digest"], name
        assert (found["metrics"], found["bytes"]) == (other["metrics"], other["bytes"]), name
        if not traits.pooled:
            ignored = {silo: facts["ignored"] for silo, facts in found["per_silo"].items()}
            assert ignored == counts, name
            both = {silo: facts["image_only"] + facts["text_only"] for silo, facts in found["per_silo"].items()}
            assert both == counts, name
        assert "ignored" not in json.dumps(other), name


@pytest.mark.parametrize("name", ["rcsr", "fedbridge"])
def test_a_method_that_anchors_unpaired_items_trains_on_them_and_ignores_none(
    name: str, tiny: Path, tmp_path: Path, written: Callable[..., Path]
) -> None:
    options = "{name: fedbridge, warmup: 0.0, support: 1}" if name == "fedbridge" else "{name: rcsr, warmup: 1}"
    settings = (*BY_SITE, f"protocol={options}", "rounds=3")
    found = run(tiny, tmp_path / "mixed", written(NO_IMAGE, NO_TEXT), *settings)
    other = run(tiny, tmp_path / "without", written(rows=np.flatnonzero(~(NO_IMAGE | NO_TEXT))), *settings)
    assert found["model_digest"] != other["model_digest"]
    assert "ignored" not in json.dumps(found)
    assert sum(facts["samples"] for facts in found["per_silo"].values()) == 60


def test_held_out_items_without_a_modality_are_counted_and_not_evaluated(
    tiny: Path, tmp_path: Path, written: Callable[..., Path]
) -> None:
    lacking = np.isin(np.arange(N), [61, 70, 71])
    found = run(tiny, tmp_path / "lacking", written(None, lacking), *BY_SITE)
    other = run(tiny, tmp_path / "without", written(rows=np.flatnonzero(~lacking)), *BY_SITE)
    assert found["heldout_without_pair"] == 3
    assert found["metrics"] == other["metrics"]
    assert found["model_digest"] == other["model_digest"]


def facts_of(scenario: Scenario) -> tuple[SiloFacts, ...]:
    return build_population(scenario).silos


def test_a_rate_per_item_makes_pairs_and_items_without_one_in_the_same_silo(
    tiny: Path, written: Callable[..., Path]
) -> None:
    settings = (*BASE, "partition={kind: iid}", "missing_modality={per: item, rate: 0.5}")
    silos = facts_of(resolved(tiny, f"data.path={written()}", *settings))
    assert sum(silo.unpaired for silo in silos) == 30
    assert all(silo.paired and silo.image_only and silo.text_only for silo in silos)
    assert silos == facts_of(resolved(tiny, f"data.path={written()}", *settings, "seed=0"))


@pytest.mark.parametrize("name", ["rcsr", "fedavg"])
def test_a_silo_with_a_single_pair_is_refused_because_it_could_never_train(
    name: str, tiny: Path, tmp_path: Path, written: Callable[..., Path]
) -> None:
    lacking = np.zeros(N, bool)
    lacking[np.flatnonzero((SITE == "site-2") & (SPLIT == "train"))[1:]] = True
    if name == "fedavg":
        with pytest.raises(InputError, match=r"silo-02 with a single pair, which has no negatives"):
            run(tiny, tmp_path, written(None, lacking), *BY_SITE, *of_method(name))
        return
    found = run(tiny, tmp_path, written(None, lacking), *BY_SITE, *of_method(name))  # it trains on the anchored ones
    assert found["per_silo"]["silo-02"]["ignored"] == 1
