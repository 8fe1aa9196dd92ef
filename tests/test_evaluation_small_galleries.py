"""Metrics of silos with few held-out items are ranked against the whole gallery, whatever items a silo has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.config.resolve import load
from fedmq.config.scenario import Scenario
from fedmq.data.silo_dataset import CaptionRows, SiloDataset
from fedmq.errors import InputError
from fedmq.evaluation.heldout import HeldOut
from fedmq.evaluation.metrics import BUILT_IN
from fedmq.federation.protocol import Encoders
from fedmq.wire.payloads import Metrics
from tests import in_process_run
from tests.threaded_run import resolved

WIDTH = 6
UNCHANGED = Encoders(lambda x: x, lambda x: x)


@pytest.fixture(scope="module")
def scenario(tiny: Path) -> Scenario:
    return load(tiny)


@st.composite
def splits(draw: st.DrawFn) -> tuple[SiloDataset, list[np.ndarray]]:
    """A split of unrelated random vectors with 1 to 3 captions per image, and its items by silo, often one each."""
    owners = draw(st.lists(st.integers(0, 5), min_size=2, max_size=40))
    captions = draw(st.lists(st.integers(1, 3), min_size=len(owners), max_size=len(owners)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    counts = torch.tensor(captions)
    text = CaptionRows(torch.randn(int(counts.sum()), WIDTH, generator=generator), counts.cumsum(0) - counts)
    image = torch.randn(len(owners), WIDTH, generator=generator)
    silos = [np.flatnonzero(np.array(owners) == silo) for silo in sorted(set(owners))]
    return SiloDataset(image, text, counts, None, torch.arange(len(owners))), silos


def evaluated(scenario: Scenario, split: SiloDataset, silos: list[np.ndarray]) -> tuple[Metrics, dict[str, np.ndarray]]:
    items = {f"silo-{number:02d}": rows for number, rows in enumerate(silos)}
    heldout = HeldOut(scenario, split, items, None, {}, BUILT_IN)
    return heldout.measured(UNCHANGED, binary=False, names=tuple(items)), items


def recalls_by_sorting(split: SiloDataset, rows: np.ndarray, k: int) -> tuple[float, float]:
    """Recall@k of some items as queries into all items, image to text and text to image, by the definition."""
    assert split.image is not None and split.text is not None
    image, text = (torch.nn.functional.normalize(each, dim=1).numpy() for each in (split.image, split.text.values))
    owner = np.repeat(np.arange(len(image)), split.captions.numpy())
    scores = image @ text.T
    i2t = [item in owner[np.argsort(-scores[item], kind="stable")[:k]] for item in rows]
    t2i = [
        owner[caption] in np.argsort(-scores[:, caption], kind="stable")[:k]
        for caption in np.flatnonzero(np.isin(owner, rows))
    ]
    return float(np.mean(i2t)), float(np.mean(t2i))


@given(splits())
@settings(max_examples=60, deadline=None)
def test_the_recall_of_a_silo_is_that_of_its_items_in_the_whole_gallery(
    scenario: Scenario, drawn: tuple[SiloDataset, list[np.ndarray]]
) -> None:
    split, silos = drawn
    found, items = evaluated(scenario, split, silos)
    for name, rows in items.items():
        for k in (1, 5):
            expected = recalls_by_sorting(split, rows, k)
            values = found.per_silo[name]
            assert (values[f"i2t_r{k}"], values[f"t2i_r{k}"]) == pytest.approx(expected), (name, k)
            assert values[f"mean_r{k}"] == pytest.approx(np.mean(expected))


@pytest.mark.parametrize(("silos", "refused"), [pytest.param(12, False, marks=pytest.mark.slow), (23, True)])
def test_an_own_gallery_of_a_single_item_is_refused(tiny: Path, tmp_path: Path, silos: int, *, refused: bool) -> None:
    settings = ("evaluation.silo_gallery=own", f"silos.count={silos}", "missing_modality.silos={}", "rounds=1")
    chosen = resolved(tiny, *settings, "partition={kind: iid}")
    if not refused:
        in_process_run.run(chosen, tmp_path)
        return
    with pytest.raises(InputError, match=r"evaluation.silo_gallery: found 'own with silo-\d\d, whose gallery has a"):
        in_process_run.run(chosen, tmp_path)
