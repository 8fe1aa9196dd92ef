"""``partition: {kind: column}`` partitions a manifest or a features file by one of its columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.io as scipy_io
from PIL import Image
from safetensors.numpy import save_file

from fedmq.config.resolve import ResolvedRun, parse
from fedmq.config.scenario import Data, Scenario
from fedmq.data.extract import plan
from fedmq.data.readers.manifest import read_manifest
from fedmq.errors import InputError
from fedmq.federation.population import Population, build_population
from fedmq.launch import preparation
from tests.threaded_run import run_of

HOSPITALS = ("north", "south", "east") * 8
SPLIT = ("train",) * 15 + ("test",) * 6 + ("database",) * 3


def features(path: Path, values: object = HOSPITALS, split: tuple[str, ...] = SPLIT) -> Path:
    rows = np.arange(24 * 4, dtype=np.float32).reshape(24, 4)
    np.savez(path, image=rows, text=rows, split=np.array(split), hospital=np.array(values))
    return path


def scenario(path: Path, silos: int = 3, **more: object) -> Scenario:
    raw = {
        "name": "column",
        "protocol": "fedavg",
        "data": {"name": "features", "path": str(path)},
        "backbone": {"name": "features"},
        "silos": {"count": silos},
        "partition": {"kind": "column", "column": "hospital"},
        **more,
    }
    return parse(raw, Path("column.yaml"))


def held(values: tuple[str, ...], value: str, split: str) -> list[int]:
    return [row for row in range(24) if values[row] == value and SPLIT[row] == split]


def test_each_value_is_a_silo_in_sorted_order_in_every_split(tmp_path: Path) -> None:
    population = build_population(scenario(features(tmp_path / "all.npz")), cache=tmp_path)
    for index, value in enumerate(sorted(set(HOSPITALS))):
        train = held(HOSPITALS, value, "train")
        assert population.train[index].tolist() == train
        assert population.heldout[index].tolist() == held(HOSPITALS, value, "test")
        assert population.galleries[index].tolist() == sorted([*train, *held(HOSPITALS, value, "database")])


def test_a_safetensors_file_holds_the_column_as_numbers_or_as_text_in_its_metadata(tmp_path: Path) -> None:
    rows = np.arange(24 * 4, dtype=np.float32).reshape(24, 4)
    split = np.array([0] * 15 + [2] * 6 + [4] * 3)
    for path, tensors, metadata in (
        (tmp_path / "text.safetensors", {}, {"hospital": json.dumps(HOSPITALS)}),
        (tmp_path / "numbers.safetensors", {"hospital": np.array([1, 2, 0] * 8)}, {}),
    ):
        save_file({"image": rows, "text": rows, "split": split, **tensors}, path, metadata)
        population = build_population(scenario(path), cache=tmp_path)
        assert population.train[0].tolist() == held(HOSPITALS, "east", "train")


def in_matlab(path: Path, values: object, **more: object) -> Scenario:
    rows = np.random.default_rng(0).normal(size=(24, 4))
    arrays = {"I": rows, "T": rows + 1, "L": np.arange(24) % 2, "split": np.array([0] * 15 + [2] * 6 + [4] * 3)}
    scipy_io.savemat(path, arrays | {"hospital": values} | more)
    data = {"name": "mirflickr", "path": str(path)}
    return scenario(path, data=data)


@pytest.mark.parametrize("values", [np.array(HOSPITALS, object), np.array(HOSPITALS), np.array([[1.0, 2.0, 0.0] * 8])])
def test_a_matlab_file_holds_the_column_as_cells_strings_or_numbers(tmp_path: Path, values: object) -> None:
    population = build_population(in_matlab(tmp_path / "all.mat", values), cache=tmp_path)
    assert [rows.tolist() for rows in population.train] == [
        held(HOSPITALS, value, "train") for value in ("east", "north", "south")
    ]


def test_a_matlab_column_that_is_missing_or_of_another_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "all.mat"
    with pytest.raises(InputError, match=r"all.mat: hospital: found 'float64 \[23\]'|hospital: found .*23"):
        build_population(in_matlab(path, np.arange(23.0)), cache=tmp_path)
    made = in_matlab(path, np.array(HOSPITALS))
    other = made.model_copy(
        update={
            "data": made.dataset.model_copy(update={"column": "ward"}),
            "partition": made.partition.model_copy(update={"column": "ward"}),
        }
    )
    with pytest.raises(InputError, match=r"partition.column ward: found 'arrays .*hospital"):
        build_population(other, cache=tmp_path)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_manifest_may_have_the_column_that_the_partition_names(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"list.{ending}"
    rows = [("a.jpg", "a cat", "north"), ("b.jpg", "a dog", "south")]
    if ending == "csv":
        path.write_text("image,caption,hospital\n" + "".join(f"{','.join(row)}\n" for row in rows))
    else:
        plain = [dict(zip(("image", "caption", "hospital"), row, strict=True)) for row in rows]
        path.write_text("".join(json.dumps(each) + "\n" for each in plain))
    assert read_manifest(Data(name="manifest", path=path, column="hospital")).column == ("north", "south")
    with pytest.raises(InputError, match=r"found 'hospital', allowed: fields image, "):
        read_manifest(Data(name="manifest", path=path))


def test_the_check_before_photos_are_encoded_partitions_a_manifest_by_its_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["image,caption,hospital,split"]
    for place, hospital in enumerate(HOSPITALS[:12]):
        Image.new("RGB", (8, 8), (20 * place, 0, 0)).save(tmp_path / f"{place}.png")
        lines.append(f"{place}.png,number {place},{hospital},{'test' if place < 3 else 'train'}")
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    made = scenario(tmp_path, data={"name": "manifest", "path": str(tmp_path / "list.csv")}, backbone={"name": "lite"})
    dealt: list[list[int]] = []

    def can_start(_: ResolvedRun, __: Scenario, population: Population) -> None:
        dealt.extend(rows.tolist() for rows in population.train)

    monkeypatch.setattr(preparation, "_can_start", can_start)
    made_of = plan(made.dataset, made.backbone, tmp_path, made.seed, "cpu")
    preparation.refuse_before_extraction(run_of(made), made_of)
    assert dealt == [[5, 8, 11], [3, 6, 9], [4, 7, 10]]


def test_an_item_without_a_value_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("image,caption,hospital\na.jpg,a cat,north\nb.jpg,a dog,\n")
    with pytest.raises(InputError, match=r"list.csv: line 3: hospital: found .*, allowed: a text or a whole number"):
        read_manifest(Data(name="manifest", path=path, column="hospital"))


def test_another_number_of_values_than_silos_is_refused_with_the_values(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"silos.count: found 4, allowed: 3, the values of column hospital: east, north, south"
    ):
        build_population(scenario(features(tmp_path / "all.npz"), silos=4), cache=tmp_path)


def test_a_value_without_an_evaluated_item_is_refused_by_name(tmp_path: Path) -> None:
    values = tuple("west" if row == 0 else value for row, value in enumerate(HOSPITALS))
    with pytest.raises(InputError, match=r"partition.column hospital: found 'no test item with west'"):
        build_population(scenario(features(tmp_path / "all.npz", values), silos=4), cache=tmp_path)


def test_a_missing_column_is_refused_with_the_keys_there_are(tmp_path: Path) -> None:
    other = {"partition": {"kind": "column", "column": "ward"}}
    with pytest.raises(InputError, match=r"partition.column ward: found 'keys hospital in addition to the known ones'"):
        build_population(scenario(features(tmp_path / "all.npz"), **other), cache=tmp_path)


@pytest.mark.parametrize("partition", [{"kind": "column"}, {"kind": "iid", "column": "hospital"}])
def test_the_kind_and_the_name_of_the_column_need_each_other(tmp_path: Path, partition: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"partition.kind column and partition.column need each other"):
        scenario(tmp_path / "all.npz", partition=partition)
