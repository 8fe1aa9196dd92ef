"""Methods, objectives and data sets from the user's own files run; code from anywhere else is never executed."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import protocols
from fedmq.config import plug_ins
from fedmq.config.resolve import Source, read, resolve
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.federation.participant import reportable
from fedmq.storage.run_folder import RunFolder
from tests import data_set_folders, in_process_run
from tests.command_line import printed, refused
from tests.printed_code import ROOT, file_under
from tests.threaded_run import resolved

PAGE = ROOT / "docs" / "howto" / "own_methods.md"
METHOD = file_under(PAGE, "A method")
OBJECTIVE = file_under(PAGE, "An objective")
DATA_SET = file_under(PAGE, "A data set").replace("Draw(queries=1000)", "Draw(4, 2)")
MARKED = "from pathlib import Path\nPath({path!r}).touch()\n"


@pytest.fixture
def file(tiny: Path, tmp_path: Path) -> Path:
    """The tiny scenario in its own folder, with the file of a method next to it."""
    raw = yaml.safe_load(tiny.read_text())
    raw["protocol"] = {"name": "./half.py", "share": 0.25}
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(raw))
    (tmp_path / "half.py").write_text(METHOD)
    return path


def digest_of(scenario: Scenario, out: Path) -> str:
    return str(in_process_run.run(scenario, out).summary.model_digest)


# ------------------------------------------------------------------------------------------------------------ methods
@pytest.mark.slow
def test_a_method_from_a_user_file_runs(file: Path, tmp_path: Path) -> None:
    half = resolved(file)
    assert half.protocol.label == "half.py"
    whole = resolved(file, "protocol.share=1.0")
    plain = resolved(file, "protocol=fedavg")
    found = [digest_of(each, tmp_path / name) for name, each in (("half", half), ("whole", whole), ("plain", plain))]
    assert found[1] == found[2] != found[0], "a share of 1 is FedAvg"
    assert str(tmp_path) not in RunFolder(tmp_path / "half").scenario.read_text().partition("data:")[0]


@pytest.mark.slow
def test_every_process_of_a_run_executes_the_user_file_and_the_run_can_be_replayed(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    printed("scenario", file, "--out", run, "--quiet")
    (tmp_path / "half.py").write_text("raise RuntimeError('edited')")
    printed("replay", run, "--quiet")  # the copy of that time is executed
    printed("audit", run)
    again = tmp_path / "again"
    printed("scenario", run / "scenario.yaml", "--out", again, "--quiet")
    digests = [json.loads(RunFolder(each).summary.read_text())["model_digest"] for each in (run, again)]
    assert digests[0] == digests[1]


def test_a_run_is_identified_by_the_content_of_the_user_file_and_not_by_its_folder(file: Path, tmp_path: Path) -> None:
    first = resolve(read(file), protocols)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "half.py").write_text(METHOD)
    (tmp_path / "half.py").write_text(METHOD + "# another version\n")
    second = resolve(read(file), protocols)
    assert first.id != second.id
    assert first.scenario.protocol.label == second.scenario.protocol.label
    there = file.rename(tmp_path / "elsewhere" / "scenario.yaml")
    assert resolve(read(there), protocols).id == first.id


def test_a_run_does_not_resume_with_a_changed_user_file(file: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    run.scenario.write_text(resolved(file, "launcher=inline").dump())
    (tmp_path / "half.py").write_text(METHOD + "# another version\n")
    message = refused("scenario", file, "--set", "launcher=inline", "--resume", run.root)
    assert "a run of another scenario: protocol.name is half.py@" in message
    assert message.count("\n") == 1


#: The text of a file that is no method, and the error.
WRONG = (
    (None, r"half\.py: found 'no such file', allowed: a Python file"),
    ("def f(:\n", r"half\.py: line 1: found 'invalid syntax', allowed: valid Python"),
    ("x = 1\n\nimport no_such_module\n", r"half\.py: line 3: found \"ModuleNotFoundError: No module"),
    ("x = 1\n", r"half\.py: found 'no PROTOCOL', allowed: PROTOCOL = \.\.\., a subclass of"),
    ("PROTOCOL = 3\n", r"half\.py: PROTOCOL: found 'an object of type int, no class'"),
    (METHOD.replace("Half(AnchoredFedAvg)", "Half"), "class Half, which is no subclass of Fed"),
    (
        METHOD.replace("share: float = 0.5", "share: str").replace("(AnchoredOptions)", ""),
        "without a default for share",
    ),
)


def test_an_invalid_method_file_is_refused_with_one_line(file: Path) -> None:
    for text, message in WRONG:
        (file.parent / "half.py").unlink(missing_ok=True)
        if text is not None:
            (file.parent / "half.py").write_text(text)
        with pytest.raises(InputError, match=message) as caught:
            resolve(read(file), protocols)
        assert "\n" not in str(caught.value)


def test_an_unknown_option_of_a_user_method_is_named_with_its_line(file: Path) -> None:
    file.write_text(file.read_text().replace("share: 0.25", "shar: 0.25"))
    with pytest.raises(
        InputError, match=r"scenario\.yaml: line \d+: protocol: found 'shar', allowed: did you mean share"
    ):
        resolve(read(file), protocols)


# ----------------------------------------------------------------------------------- objectives, data sets, packages
def test_an_objective_from_a_user_file_runs(file: Path, tmp_path: Path) -> None:
    (tmp_path / "pulled.py").write_text(OBJECTIVE)
    raw = {**yaml.safe_load(file.read_text()), "protocol": "fedavg", "objective": {"base": "pulled.py", "weight": 2}}
    file.write_text(yaml.safe_dump(raw))
    scenario = resolved(file)
    assert scenario.objective.options == {"weight": 2.0}
    summary = in_process_run.run(scenario, tmp_path / "run").summary
    assert summary.per_silo["silo-00"].participations > 0
    assert digest_of(resolved(file, "objective.weight=1"), tmp_path / "other") != summary.model_digest
    with pytest.raises(InputError, match=r"objective\.wight: found 'wight', allowed: did you mean weight\?"):
        resolved(file, "objective.wight=1")


@pytest.mark.slow
def test_a_data_set_from_a_user_file_is_read(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    entries = []
    for number in range(16):
        data_set_folders.photo(folder / "photos" / f"{number}.png", number)
        entries.append({"file": f"{number}.png", "class": f"{number % 2}", "text": f"picture number {number}"})
    (folder / "list.json").write_text(json.dumps(entries))
    (tmp_path / "pairs.py").write_text(DATA_SET)
    raw = yaml.safe_load(file.read_text())
    raw |= {"protocol": "fedavg", "data": {"name": "./pairs.py", "path": str(folder)}, "backbone": "lite"}
    raw |= {"backbone": {"name": "lite"}, "silos": {"count": 2}, "partition": {"kind": "iid"}, "missing_modality": {}}
    file.write_text(yaml.safe_dump(raw))
    summary = in_process_run.run(resolved(file, "rounds=1", "training.warmup_rounds=0"), tmp_path / "run").summary
    assert sum(each.samples for each in summary.per_silo.values()) == 10


def test_the_nearest_name_is_suggested_for_a_misspelt_one(tiny: Path) -> None:
    for setting, message in (
        ("protocol=rcrs", r"--set protocol: protocol\.name: found 'rcrs', allowed: did you mean rcsr\?"),
        ("protocol=MOON", r"protocol\.name: found 'MOON', allowed: did you mean moon\?"),
        ("objective=dcmhh", r"--set objective: objective\.base: found 'dcmhh', allowed: did you mean dcmh"),
        ("data.name=feature", r"--set data\.name: found 'feature', allowed: did you mean features\?"),
        ("protocol={name: fedprox, muu: 1}", r"found 'muu', allowed: did you mean mu\?"),
    ):
        with pytest.raises(InputError, match=message):
            resolve(read(tiny, [setting]), protocols)


def test_a_method_of_an_installed_package_is_found_by_its_entry_point(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("somebodys_half")
    monkeypatch.setitem(sys.modules, "somebodys_half", module)
    exec(METHOD, vars(module))

    def entry_points(*, group: str, **params: Any) -> list[EntryPoint]:
        found = [EntryPoint("half", "somebodys_half", "fedmq.protocols"), EntryPoint("fedavg", "os", "fedmq.protocols")]
        return [each for each in found if each.group == group and params.get("name", each.name) == each.name]

    monkeypatch.setattr(plug_ins, "entry_points", entry_points)
    assert "half" in protocols.names()
    assert protocols.names().count("fedavg") == 1
    assert resolved(tiny, "protocol={name: half, share: 0.5}").protocol.options["share"] == 0.5
    assert protocols.load("fedavg").__module__ == "protocols.fedavg", "a built-in name is nobody else's"


# ---------------------------------------------------------------------------------------------- code that never runs
def test_a_foreign_run_folder_executes_no_code(file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    evil = run.root / "evil.py"
    evil.write_text(METHOD + MARKED.format(path=str(trace)))
    raw = resolved(file, "launcher=inline").model_dump(mode="json")
    for name in (str(evil), "./evil.py", f"evil.py@{'0' * 64}"):
        run.scenario.write_text(yaml.safe_dump({**raw, "protocol": {"name": name}}))
        message = refused("replay", run.root, "--quiet")
        assert "evil.py" in message
        assert message.count("\n") == 1
        assert "evil.py" in refused("scenario", file, "--set", "launcher=inline", "--resume", run.root)
        assert not trace.exists()


def test_code_unknown_on_this_machine_is_refused_until_the_user_names_the_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "first"))
    text = METHOD + f"# {tmp_path}\n"
    (tmp_path / "half.py").write_text(text)
    reference = plug_ins.adopt(tmp_path / "half.py")
    raw = yaml.safe_load(file.read_text())
    raw["protocol"] = {"name": reference}
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "second"))
    source = Source(file, Scenario.model_validate(raw))
    with pytest.raises(
        InputError, match=r"half\.py: found 'content with SHA-256 .*, unknown here', allowed: .*fedmq protocols"
    ):
        resolve(source, protocols, adopt=False)
    printed("protocols", tmp_path / "half.py")
    assert resolve(source, protocols, adopt=False).scenario.protocol.name == reference


def test_an_error_in_a_user_file_is_reported_with_its_line_and_its_text_only_on_the_same_machine(
    tmp_path: Path,
) -> None:
    own = tmp_path / "mine.py"
    own.write_text("def loss(image):\n    return image.cod\n")
    module = plug_ins.load(plug_ins.adopt(own))
    with pytest.raises(AttributeError) as caught:
        module.loss("an image")
    assert reportable(caught.value) == "mine.py: line 2: AttributeError"
    whole = "mine.py: line 2: AttributeError: 'str' object has no attribute 'cod'"
    assert reportable(caught.value, whole=True) == whole


def test_a_tampered_copy_is_not_executed(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))
    (tmp_path / "half.py").write_text(METHOD + f"# tampered {tmp_path}\n")
    reference = plug_ins.adopt(tmp_path / "half.py")
    (copy,) = (tmp_path / "cache" / "code").glob("*.py")
    copy.write_text(METHOD + MARKED.format(path=str(tmp_path / "executed")))
    with pytest.raises(InputError, match="unknown here"):
        plug_ins.load(reference)
    assert not (tmp_path / "executed").exists()


def test_a_file_that_cannot_be_python_is_refused_before_it_is_read_or_compiled(tmp_path: Path) -> None:
    names = ("pipe", "device", "deep", "large", "folder")
    pipe, device, deep, large, folder = (tmp_path / f"{name}.py" for name in names)
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    deep.write_text("x = " + "-" * 100_000 + "1\n")
    large.write_bytes(b"#" * (5 << 20))
    folder.mkdir()
    for path in (pipe, device, deep, large, folder, tmp_path / f"{'x' * 300}.py"):
        with pytest.raises(plug_ins.UserFileError):
            plug_ins.adopt(path)
