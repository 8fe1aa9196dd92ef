"""The command line: bad input prints one line, exits with code 2 and writes nothing."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedmq.cli import console
from fedmq.cli import keys as key_commands
from fedmq.cli import main as cli
from fedmq.cli import run as run_commands
from fedmq.cli.scenarios import resolved_file
from fedmq.config import resolve as scenarios
from fedmq.data.readers.manifest import read_manifest
from fedmq.encoders.image_sets import ImageFiles
from fedmq.errors import InputError
from fedmq.runs.report import html
from fedmq.storage.run_folder import RunFolder
from tests.command_line import completed, fedmq, printed, refused
from tests.run_summaries import summary
from tests.waiting import PATIENCE

#: Settings of a scenario, and what the one line of their error has.
REFUSED_SETTINGS = (
    (["protocol.name=fedsgd"], "--set protocol.name: found 'fedsgd'"),
    (["protocol.warmup=-3"], "protocol.warmup"),
    (["partition.clusters=500"], "partition.clusters"),
    (["data.path=nowhere.npz"], "nowhere.npz"),
    (["data.path=README.md"], "README.md"),
    (["device=cuda:99"], "cuda:99"),
    (["backbone.name=ViT-Z-99", "data={name: openmoji}"], "ViT-Z-99"),
    (["backbone.head=residual", "data.path=UNEQUAL"], "backbone.head"),
    (["launcher=none"], "fedmq coordinator"),
    (['data.path="a\\0b"'], "data.path"),
)


@pytest.mark.slow
def test_bad_input_prints_one_line_and_writes_nothing(tiny: Path, tmp_path: Path) -> None:
    unequal, out = tmp_path / "unequal.npz", tmp_path / "run"
    rows = np.random.default_rng(0).normal(size=(50, 10)).astype(np.float32)
    np.savez(unequal, image=rows[:, :6], text=rows[:, 6:])
    for settings, expected in REFUSED_SETTINGS:
        options = [item for setting in settings for item in ("--set", setting.replace("UNEQUAL", str(unequal)))]
        error = refused("scenario", tiny, "--out", out, "--quiet", *options)
        assert len(error.splitlines()) == 1, error
        assert expected in error and "allowed" in error
        assert not out.exists()


#: Command lines, and what the one line of their error has.
REFUSED = (
    (["scenario"], "FILE: found 'no scenario', allowed: a scenario (YAML), or --resume RUN"),
    (["scenario", "nowhere.yaml"], "nowhere.yaml: found 'no such file'"),
    (["evaluator"], "Missing argument 'FILE'; see fedmq evaluator --help"),
    (["scenaro", "x.yaml"], "No such command 'scenaro'"),
    (["scenario", "x.yaml", "--sed", "1"], "No such option: --sed"),
    (["scenario", "x.yaml", "--seed", "1", "--seed", "x"], "'--seed': Input should be a valid integer"),
    (["compare", "x.yaml", "--jobs=0"], "Invalid value for '--jobs': Input should be greater than"),
    (["compare", "TINY", "--seeds", ""], "--seeds: found ''"),
    (["data", "check", "TINY", "--set", "backbone.name=lite"], "features with data.name features"),
    (["scenario", "TINY", "--extend", "2"], "--extend: found '2', allowed: --resume RUN --extend ROUNDS"),
    (["scenario", "--resume", "FOLDER", "--out", "FOLDER"], "no --out with --resume RUN"),
    (["scenario", "--resume", "FOLDER"], "no scenario.yaml in it"),
    (["protocols", "rcs"], "fedmq protocols: found 'rcs', allowed: did you mean rcsr?"),
    *(([command, "runs/nothere"], "fedmq: runs/nothere: found 'no such folder'") for command in ("audit", "status")),
    *(([command, "a" * 5000], "fedmq: a") for command in ("audit", "verify", "compare")),
)


def test_a_refused_command_line_prints_one_line(tiny: Path, tmp_path: Path) -> None:
    for words, expected in REFUSED:
        error = refused(*({"TINY": tiny, "FOLDER": tmp_path}.get(word, word) for word in words))
        assert len(error.splitlines()) == 1, (words, error)
        assert error.startswith("fedmq: ") and expected in error, words


def test_a_folder_in_use_is_not_overwritten(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    refused("scenario", tiny, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_runs_started_within_one_second_get_separate_folders(tmp_path: Path) -> None:
    made = [run_commands._new_folder(tmp_path, "smoke-20260101-000000").name for _ in range(3)]
    assert made == ["smoke-20260101-000000", "smoke-20260101-000000-2", "smoke-20260101-000000-3"]


def test_a_folder_taken_by_another_run_in_the_meantime_keeps_its_scenario(tiny: Path, tmp_path: Path) -> None:
    folder, scenario = RunFolder(tmp_path), scenarios.load(tiny)
    run_commands._begin(folder, scenario, extended=False)
    before = folder.scenario.read_text()
    with pytest.raises(InputError, match="another run has taken"):
        run_commands._begin(folder, scenario.model_copy(update={"seed": 1}), extended=False)
    assert folder.scenario.read_text() == before


def test_only_an_unfinished_run_of_the_same_scenario_is_resumed(tiny: Path, tmp_path: Path) -> None:
    coordinator = ("coordinator", tiny, "--keys", tmp_path)
    other = tmp_path / "other"
    refused(*coordinator, "--resume", other)
    assert "no --out with --resume RUN" in refused(*coordinator, "--resume", other, "--out", other)
    other.mkdir()
    written = tiny.read_text().replace("rounds: 4", "rounds: 5")
    (other / "scenario.yaml").write_text(written)
    for begin in ((*coordinator, "--out"), (*coordinator, "--resume"), ("scenario", tiny, "--resume")):
        error = refused(*begin, other)
        assert "rounds is 5, here 4" in error and str(other / "scenario.yaml") in error
    assert (other / "scenario.yaml").read_text() == written
    assert [path.name for path in other.iterdir()] == ["scenario.yaml"]
    (other / "scenario.yaml").write_text(tiny.read_text())
    (other / "summary.json").write_text(json.dumps(summary().plain()))
    assert "a finished run" in refused(*coordinator, "--resume", other)


def test_a_coordinator_does_not_start_in_a_folder_with_checkpoints(tiny: Path, tmp_path: Path) -> None:
    begin = ("coordinator", tiny, "--keys", tmp_path / "keys", "--out", tmp_path / "run")
    # Personal state of silos may be there already; then only the coordinator's key is missing.
    (tmp_path / "run" / "checkpoints" / "silos").mkdir(parents=True)
    assert "coordinator.key" in refused(*begin)
    (tmp_path / "run" / "checkpoints" / "version-000002").mkdir()
    error = refused(*begin)
    assert "a folder with checkpoints of a run" in error
    assert "--resume" in error


def test_wrong_keys_are_named(tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert "silo-00.key" in refused("silo", tiny, "--name", "silo-00", "--keys", keys, "--out", tmp_path / "o")
    printed("keys", "init", keys, "--silos", "4")
    refused("keys", "init", keys, "--silos", "4")
    (keys / "silo-00.key").chmod(0o644)
    assert "0600" in refused("silo", tiny, "--name", "silo-00", "--keys", keys, "--out", tmp_path / "o")
    refused("silo", tiny, "--name", "silo-09", "--keys", keys, "--out", tmp_path / "o")
    printed("keys", "remove", "silo-03", "--keys", keys)
    bind = ("--bind", "ipc:///tmp/x")
    assert "silo-03" in refused("coordinator", tiny, "--keys", keys, "--out", tmp_path / "o", *bind)
    assert not (tmp_path / "o").exists()


def test_methods_losses_and_their_options_are_listed_and_explained() -> None:
    listing = json.loads(printed("protocols", "--json"))
    assert {"fedavg", "paired_only", "rcsr"} <= set(listing)
    assert listing["rcsr"]["options"]["warmup"]["default"] == 20
    assert "lambda_anc: 1.0" in printed("protocols").replace("\n", " ")
    (explained,) = json.loads(printed("protocols", "fedprox", "--json")).values()
    assert explained["options"]["single_modality"]["values"] == "anchor, idle", "inherited from FedAvg"
    for words, text in ((("losses", "dcmh"), "weight of the balance"), (("losses",), "csq")):
        assert text in " ".join(printed(*words).split())


def test_data_check_shows_which_silo_would_hold_which_data(tiny: Path) -> None:
    facts = json.loads(printed("data", "check", tiny, "--json"))
    assert facts["splits"] == {"train": 100, "val": 20, "test": 30, "public": 0, "database": 0}
    assert facts["silos"]["silo-02"]["modalities"] == ["image"]
    assert sum(own["samples"] for own in facts["silos"].values()) == 100
    printed("data", "list")


def test_relative_paths_of_weights_become_absolute_and_tag_names_stay(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("w.pt", "tower.json", "openai"):
        (tmp_path / name).touch()
    (tmp_path / "bert").mkdir()
    monkeypatch.chdir(tmp_path)

    def backbone(written: str, *, manual: bool = False) -> tuple[str, str | None, Path | None]:
        settings = ["data={name: openmoji}", f"backbone={written}"]
        found = resolved_file(tiny, settings, manual=manual).scenario.backbone
        return found.name, found.pretrained, found.text_encoder

    (tmp_path / "trace.csv").write_text("silo,on,off\nsilo-00,0,100\n")
    chosen = resolved_file(tiny, ["participation={kind: availability, trace: trace.csv}"]).scenario
    assert chosen.participation.trace == tmp_path / "trace.csv"
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = scenarios.with_absolute_paths(scenarios.load(tiny, ["data.path=~/mine.npz"]), weights=False)
    assert at_home.data is not None and at_home.data.path == tmp_path / "mine.npz"
    of_file = "{name: tower.json, pretrained: w.pt, text_encoder: bert}"
    assert backbone(of_file) == (str(tmp_path / "tower.json"), str(tmp_path / "w.pt"), tmp_path / "bert")
    assert backbone(of_file, manual=True) == ("tower.json", "w.pt", Path("bert")), "agreed on by several machines"
    assert backbone("{name: ViT-B-32, pretrained: openai}") == ("ViT-B-32", "openai", None)
    assert backbone("{name: tower.json}") == ("tower.json", None, None), "random weights are drawn by this name"
    assert backbone("{name: ViT-B-32, pretrained: not/there.pt}") == ("ViT-B-32", "not/there.pt", None)


def test_a_linked_manifest_finds_its_images_next_to_the_link(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "set").mkdir()
    lines = [f'{{"image": "{name}", "captions": ["{name}"]}}\n' for name in ("1.png", "2.png")]
    (tmp_path / "blobs" / "3fa9").write_text("".join(lines))
    (tmp_path / "set" / "list.jsonl").symlink_to(Path("..", "blobs", "3fa9"))
    monkeypatch.chdir(tmp_path)
    chosen = resolved_file(tiny, ["data={name: manifest, path: set/list.jsonl}"]).scenario
    assert chosen.data.path == tmp_path / "set" / "list.jsonl"
    images = read_manifest(chosen.data).images
    assert isinstance(images, ImageFiles)
    assert images.paths == (tmp_path / "set" / "1.png", tmp_path / "set" / "2.png")
    (tmp_path / "round.jsonl").symlink_to("round.jsonl")
    with pytest.raises(InputError, match=r"data\.path: found 'round.jsonl', allowed: a path"):
        resolved_file(tiny, ["data={name: manifest, path: round.jsonl}"])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["protocols"]])
def test_output_to_a_full_device_fails_with_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "fedmq", *arguments]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == cli.FAILED
    assert ended.stderr == "fedmq: the output: could not be written: No space left on device\n"


@pytest.mark.slow
def test_a_run_started_without_messages_resumes_only_without_them(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    printed("scenario", tiny, "--out", out, "--quiet", "--set", "launcher=inline")
    (out / "summary.json").unlink()
    assert "found 'a run without messages', allowed: launcher inline, as at its start" in refused(
        "scenario", tiny, "--resume", out, "--quiet"
    )
    printed("scenario", tiny, "--resume", out, "--quiet", "--set", "launcher=inline")


def test_a_run_without_the_packages_of_the_report_has_its_result_and_one_warning(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    html._plotly.cache_clear()  # an earlier test may have read it
    out = tmp_path / "run"
    done = completed("scenario", tiny, "--out", out, "--set", "launcher=inline", "--set", "rounds=1")
    assert "model digest" in done.stdout and not (out / "report.html").exists()
    assert (done.stdout + done.stderr).count("package plotly.offline missing") == 1


def test_an_invalid_address_names_its_option_and_writes_nothing(tiny: Path, tmp_path: Path) -> None:
    keys, out = tmp_path / "keys", tmp_path / "out"
    printed("keys", "init", keys, "--silos", "4")
    for command, name, option, uri in (
        ("coordinator", [], "--bind", "tcp://1.2.3.4"),
        ("silo", ["--name", "silo-00"], "--connect", "foo"),
        ("evaluator", [], "--connect", "tcp://*:5555"),
    ):
        assert f"fedmq: {option}: found {uri!r}, allowed: " in refused(
            command, tiny, *name, "--keys", keys, option, uri, "--out", out
        )
        assert not out.exists()


def test_an_address_that_cannot_be_bound_writes_nothing(tiny: Path, tmp_path: Path) -> None:
    printed("keys", "init", tmp_path / "keys", "--silos", "4")
    out = tmp_path / "out"
    options = ("--keys", tmp_path / "keys", "--out", out, "--bind")
    told = refused("coordinator", tiny, *options, "tcp://192.0.2.1:5555")
    assert "an address that is free and belongs to this machine\n" in told
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        told = refused("coordinator", tiny, *options, f"tcp://127.0.0.1:{busy.getsockname()[1]}")
    assert "another process listens there, e.g. another coordinator" in told
    assert not out.exists()


def test_fingerprints_stay_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    printed("keys", "init", tmp_path / "keys", "--silos", "2")
    lines = [line.split() for line in printed("keys", "show", tmp_path / "keys").splitlines()]
    assert [line[0] for line in lines] == ["coordinator", "evaluator", "silo-00", "silo-01"]
    assert {len(line) for line in lines} == {10}, "a name, eight words and the fingerprint"
    assert all(len(line[1]) == 64 or len(line[-1]) == 64 for line in lines)


@pytest.mark.parametrize(("encoding", "errors"), [("ascii", "surrogateescape"), ("utf-8", "strict")])
def test_characters_that_the_output_encoding_lacks_are_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, errors=errors))
    assert fedmq(monkeypatch, "protocols", "rcsr") == 0
    print("caf\u00e9 \udce9", flush=True)
    shown = written.getvalue().decode(encoding)
    assert ("caf\u00e9" if encoding == "utf-8" else "caf\\xe9") + " \\udce9\n" in shown


def test_a_command_at_a_terminal_reports_at_once_that_it_is_loading_unless_it_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, silo = tmp_path / "missing.yaml", ("--keys", tmp_path, "--name", "silo-00")
    for words, terminal, count in (
        (("scenario", missing), True, 1),
        (("silo", missing, *silo), True, 1),
        (("scenario", missing), False, 0),
        (("scenario", missing, "--quiet"), True, 0),
    ):
        screen = io.StringIO()
        monkeypatch.setattr(console, "err", Console(file=screen, force_terminal=terminal, width=120))
        refused(*words)
        assert screen.getvalue().count("starting: reading the scenario, loading torch") == count, words


def test_help_needs_none_of_the_packages_that_take_long_to_import() -> None:
    slow = {"numpy", "pydantic", "torch", "pandas", "sklearn", "plotly"}
    code = f"import sys, fedmq.cli.main; print(sorted({slow} & sys.modules.keys()))"
    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True
    )
    assert ended.stdout == "[]\n"


def test_too_many_open_files_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), None)

    monkeypatch.setattr(cli, "app", fail)
    done = completed("scenario", "s.yaml")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("fedmq: Too many open files at a connection: raise `ulimit -n`")


def test_the_help_groups_the_commands_and_shows_first_what_a_newcomer_needs() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"]).stdout
    order = ["Start here", "│ init ", "│ scenario ", "Operate", "│ coordinator ", "Audit and look", "│ compare "]
    places = [shown.find(text, shown.find("Start here")) for text in order]
    assert -1 not in places and places == sorted(places)
    assert "Commands ─" not in shown  # every command is in a group


@pytest.mark.slow
def test_the_shell_completes_commands_and_completion_is_installed_on_wish(tmp_path: Path) -> None:
    words = {"_FEDMQ_COMPLETE": "complete_bash", "COMP_WORDS": "fedmq sce", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "fedmq"]
    ended = subprocess.run(command, env={**os.environ, **words}, stdout=subprocess.PIPE, text=True, check=True)
    assert ended.stdout.split() == ["scenario"]
    # Typer would take the shell from the processes above this one, which may be make's sh.
    env = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    subprocess.run([*command, "--install-completion", "bash"], env=env, stdout=subprocess.DEVNULL, check=True)
    assert "_FEDMQ_COMPLETE" in (tmp_path / ".bash_completions" / "fedmq.sh").read_text()


# -------------------------------------------------------------------------------------------------------------- hints
def test_an_unusual_name_of_a_key_is_reported(tmp_path: Path) -> None:
    for name, remarked in (("silo3", True), ("silo-03", False), ("evaluator", False)):
        done = completed("keys", "new", name, "--keys", tmp_path)
        assert done.returncode == 0
        assert (f"{name} is not the name of a process" in done.stderr) is remarked
    assert "--replace" in refused("keys", "new", "silo-03", "--keys", tmp_path)


def test_a_key_that_is_not_confirmed_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed("keys", "new", "silo-03", "--keys", tmp_path / "site")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(key_commands.typer, "confirm", lambda _: False)
    assert completed("keys", "accept", tmp_path / "keys", tmp_path / "site" / "silo-03.request").returncode == 1
    assert not (tmp_path / "keys" / "accepted" / "silo-03.pub").exists()
