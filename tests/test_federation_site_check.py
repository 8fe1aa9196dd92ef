"""What is wrong with the data of one site, and when sites whose labels are numbers agree."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedmq.cli.scenarios import resolved_file
from fedmq.config.scenario import Backbone, Data
from fedmq.config.site import read_site
from fedmq.data.prepare import prepare
from fedmq.errors import DataItemError
from fedmq.federation.agreement import difference, format_of
from fedmq.federation.participant import SiteData
from fedmq.wire.payloads import DataFormat
from tests.command_line import fedmq

OWN = "name: own\nrounds: 3\nprotocol: fedavg\nbackbone: {name: lite}\nsilos: {count: 3}\npartition: {kind: own}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a scenario, a site file and twelve photos, of which one is broken and one has no caption."""
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    photos, draw = tmp_path / "photos", np.random.default_rng(0)
    photos.mkdir()
    for n in range(12):
        Image.fromarray(draw.integers(0, 255, (32, 32, 3), np.uint8)).save(photos / f"{n}.jpg")
        (photos / f"{n}.txt").write_text(f"photo number {n}\n")
    (photos / "3.jpg").write_bytes(b"no picture")
    (photos / "5.txt").unlink()
    (tmp_path / "own.yaml").write_text(OWN)
    (tmp_path / "silo.yaml").write_text("name: silo-00\ndata: {name: folder, path: photos}\nkeys: keys\nout: run\n")
    return tmp_path


def test_the_bad_files_of_a_site_are_all_listed(
    site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fedmq(monkeypatch, "data", "check", "own.yaml", "--site", "silo.yaml", "--json") == 2
    facts = json.loads(capfd.readouterr().out)
    assert [name.split(":")[0] for name in facts["unreadable"]] == ["3.jpg"]
    assert facts["without_captions"] == ["5.jpg"]
    (site / "photos" / "3.jpg").unlink()
    (site / "photos" / "3.txt").unlink()
    (site / "photos" / "5.txt").write_text("photo number 5\n")
    assert fedmq(monkeypatch, "data", "check", "own.yaml", "--site", "silo.yaml") == 0
    assert "11 items, 11 captions" in capfd.readouterr().out


def test_the_error_of_a_silo_names_the_command_with_both_files(site: Path) -> None:
    run = resolved_file(Path("own.yaml"), manual=True)
    with pytest.raises(
        DataItemError, match=r"5\.jpg.*`fedmq data check own\.yaml --site .*silo\.yaml` lists all problems"
    ):
        SiteData.load(run.scenario, read_site(Path("silo.yaml")), run.id, file=run.source.file)


def test_a_features_file_of_a_site_is_counted(
    site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    np.savez("site0.npz", image=draw.normal(size=(40, 8)), text=draw.normal(size=(40, 8)))
    (site / "own.yaml").write_text(OWN.replace("lite", "features"))
    (site / "silo.yaml").write_text("name: silo-01\ndata: {name: features, path: site0.npz}\n")
    assert fedmq(monkeypatch, "data", "check", "own.yaml", "--site", "silo.yaml", "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["items"] == 40 and list(facts["silos"]) == ["silo-01"]
    assert facts["silos"]["silo-01"]["samples"] == facts["splits"]["train"] > 0


# -------------------------------------------------------------------------------------------------- numbers as labels
numbers = st.lists(st.integers(0, 5), min_size=2, max_size=8)


def stated(folder: Path, name: str, labels: np.ndarray) -> tuple[DataFormat, list[list[str]]]:
    """The format that a site states, and the labels of its items by name."""
    vectors = np.random.default_rng(0).normal(size=(len(labels), 4))
    np.savez(folder / f"{name}.npz", image=vectors, text=vectors + 1, labels=labels)
    data = Data(name="features", path=folder / f"{name}.npz")
    made = prepare(data, Backbone(name="features"), folder / "cache")
    assert made.labels is not None
    held = [[made.label_names[column] for column in np.flatnonzero(row)] for row in made.labels]
    return format_of(made, image=True, text=True), held


@given(numbers, numbers)
@settings(max_examples=40, deadline=None)
def test_sites_with_unnamed_labels_agree_only_if_equal_names_are_equal_numbers(
    one: list[int], other: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, held_first = stated(Path(folder), "one", np.array(one))
        second, held_second = stated(Path(folder), "other", np.array(other))
        text = difference("silo-00", first, "silo-01", second)
        if text is None:
            named = {*zip(one, (label for (label,) in held_first), strict=True)}
            named |= {*zip(other, (label for (label,) in held_second), strict=True)}
            assert len({number for number, _ in named}) == len({label for _, label in named}) == len(named)
        else:
            assert (min(one), max(one)) != (min(other), max(other))
            assert "label columns without names" in text and "give every file label_names" in text
