"""Run folders and data made by others: FIFOs, devices, links, endless lines and archives that expand are refused."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.participation import read_trace
from fedmq.audit.log_checks import audit_run
from fedmq.data.raw_set import read_text
from fedmq.data.readers.formats import list_arrays
from fedmq.encoders.images import decode
from fedmq.errors import InputError
from fedmq.retrieval import plots
from fedmq.storage.regular_files import MAX_LINE
from fedmq.storage.run_folder import cut_unfinished, load_aligned, open_run
from tests.command_line import printed

FILES = ["scenario.yaml", "summary.json", "metrics.jsonl", "messages/silo-00.jsonl", "model/config.json",
         "model/model.safetensors"]  # fmt: skip


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def refused(run: Path) -> str:
    with pytest.raises(InputError) as caught:
        audit_run(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_fifo_and_a_link_out_of_the_folder_are_refused_and_not_opened(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a password")
    for name in FILES:
        (run / name).rename(run / "kept")
        os.mkfifo(run / name)
        assert refused(run).startswith(f"{run / name}: found 'a FIFO'")
        (run / name).unlink()
        (run / name).symlink_to(tmp_path / "secret")
        assert refused(run).startswith(f"{run / name}: found 'a link to {tmp_path / 'secret'}'")
        if name == "scenario.yaml":  # the report shows the scenario's text
            with pytest.raises(InputError, match="a link to"):
                open_run(run)
        (run / name).unlink()
        (run / "kept").rename(run / name)


@pytest.mark.parametrize("target", [None, "/dev/zero"])
@pytest.mark.parametrize(
    "read",
    [lambda path: read_trace(path, ["silo-00"]), cut_unfinished, lambda path: plots.named([path.parent])],
    ids=["trace", "lines", "comparison"],
)
def test_other_files_of_text_are_regular_ones(
    tmp_path: Path, target: str | None, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "runs.csv"
    os.mkfifo(path) if target is None else path.symlink_to(target)
    with pytest.raises(InputError, match=r"runs\.csv: found 'a (FIFO|device)'"):
        read(path)


def test_a_device_is_refused(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/zero")
    assert "a link to /dev/zero" in refused(run)
    with pytest.raises(InputError, match="found 'a device'"):
        read_text(Path("/dev/zero"))


def test_a_folder_of_logs_elsewhere_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.move(run / "messages", tmp_path / "elsewhere")
    (run / "messages").symlink_to(tmp_path / "elsewhere")
    assert "a link to" in refused(run)


@pytest.mark.parametrize("name", ["messages/silo-00.jsonl", "metrics.jsonl"])
def test_an_endless_line_is_refused_after_a_bounded_part_of_it(run: Path, name: str) -> None:
    with (run / name).open("r+b") as file:
        file.truncate(1 << 40)  # a terabyte of zeros that takes no space on disk
    if name == "metrics.jsonl":  # the audit continues with the other files
        assert any(f"more than {MAX_LINE:,} bytes" in finding.what for finding in audit_run(run).findings)
    else:
        assert f"more than {MAX_LINE:,} bytes" in refused(run)


def test_an_endless_file_is_a_finding(run: Path) -> None:
    names = ("summary.json", "model/config.json", "model/model.safetensors")
    for name in names:
        with (run / name).open("r+b") as file:
            file.truncate(1 << 40)
        assert any(name.rpartition("/")[2] in finding.place for finding in audit_run(run).findings)


def test_a_file_of_far_more_tensors_than_a_model_has_is_refused_before_it_is_read(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    listed = json.dumps({f"a{number}": empty for number in range(150_000)}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(listed).to_bytes(8, "little") + listed)
    began = time.process_time()
    with pytest.raises(OSError, match="a list of tensors of"):
        load_aligned(path)
    assert time.process_time() - began < 0.5


def test_a_report_replaces_a_link_and_does_not_write_through_it(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep this")
    (run / "audit.html").symlink_to(tmp_path / "mine")
    printed("audit", run)
    assert (tmp_path / "mine").read_text() == "keep this"
    assert not (run / "audit.html").is_symlink() and "Audit of tiny" in (run / "audit.html").read_text()


@pytest.mark.parametrize("open_it", [decode, read_text, list_arrays])
def test_a_fifo_among_the_data_is_refused_and_not_opened(tmp_path: Path, open_it: object) -> None:
    path = tmp_path / "pictures.npz"
    os.mkfifo(path)
    with pytest.raises(InputError, match="found 'a FIFO'"):
        open_it(path)  # type: ignore[operator]
