"""The code of docs/howto/extend runs as printed: a user's own files in a run, and lines in a copy of fedmq."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import protocols
from fedmq.cli import key_reference
from fedmq.config import plug_ins
from fedmq.errors import InputError
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from tests import data_set_folders, in_process_run, queue_transport, threaded_run
from tests.printed_code import EXTENDING, ROOT, blocks, file_under, recipe
from tests.threaded_run import resolved
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

EXTENSIONS = (
    "A method",
    "A variant of FedAvg",
    "An option",
    "An objective",
    "A metric",
    "A data set",
    "A payload",
    "A command",
    "A fault",
    "A transport",
)
NEW_FILE = re.compile(r"A new file, `(\S+)`:$")
INSERTION = re.compile(r"In `(\S+)`, (above|at the end of) `([^`]+)`:$")


def test_each_extension_has_a_section_of_code() -> None:
    headings = [
        heading
        for page in EXTENDING
        for heading in re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert sorted(headings) == sorted(EXTENSIONS)
    assert all(blocks(recipe(heading), heading) for heading in EXTENSIONS)


# ------------------------------------------------------------------------------------------- files of the user's own
@pytest.fixture
def printed(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the file that is printed under a heading."""

    def write(heading: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(file_under(recipe(heading), heading))
        return path

    return write


def digest_of(tiny: Path, out: Path, *settings: str) -> str:
    return str(in_process_run.run(resolved(tiny, *settings), out).summary.model_digest)


@pytest.mark.parametrize("heading", ["A method", "A variant of FedAvg"])
def test_the_method_trains_its_own_model(
    heading: str, tiny: Path, tmp_path: Path, printed: Callable[[str], Path]
) -> None:
    scenario = resolved(tiny, f"protocol={printed(heading)}")
    summary = in_process_run.run(scenario, tmp_path / "run").summary
    assert plug_ins.label(summary.protocol) == "mine.py"
    assert summary.versions == scenario.rounds
    assert summary.model_digest != digest_of(tiny, tmp_path / "fedavg", "protocol=fedavg")


def with_option(file: Path) -> Path:
    """The file of the variant with the class that is printed under "An option" in place of its own."""
    ((intro, code),) = blocks(recipe("An option"), "An option")
    name = re.search(r"In the file above, in place of `class (\w+)`:$", intro)
    assert name is not None, intro
    text = file.read_text()
    (old,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name[1]]
    lines = text.splitlines(keepends=True)
    lines[old.decorator_list[0].lineno - 1 : old.end_lineno] = [code]
    file.write_text("".join(lines))
    return file


@pytest.mark.slow
def test_the_option_is_explained_bounded_and_has_an_effect(
    tiny: Path, tmp_path: Path, printed: Callable[[str], Path]
) -> None:
    file = with_option(printed("A variant of FedAvg"))
    options = key_reference.options(protocols.load(plug_ins.adopt(file)).Options)
    (weight,) = [key for key in options if key.name == "weight"]
    assert weight.default == "0.1"
    assert weight.meaning == "weight of the squared distance between the means; 0 gives FedAvg."
    with pytest.raises(InputError, match=r"protocol\.weight: found -1, allowed: greater than or equal to 0"):
        resolved(tiny, f"protocol={{name: {file}, weight: -1}}")
    without, fedavg = f"protocol={{name: {file}, weight: 0}}", "protocol=fedavg"
    assert digest_of(tiny, tmp_path / "0", without) == digest_of(tiny, tmp_path / "fedavg", fedavg)
    assert digest_of(tiny, tmp_path / "0.1", f"protocol={file}") != digest_of(tiny, tmp_path / "fedavg-2", fedavg)


def test_the_objective_trains_its_own_network(tiny: Path, tmp_path: Path, printed: Callable[[str], Path]) -> None:
    chosen = f"objective={{base: {printed('An objective')}, weight: %d}}"
    summary = in_process_run.run(resolved(tiny, "protocol=fedavg", chosen % 1), tmp_path / "1").summary
    assert summary.model_digest != digest_of(tiny, tmp_path / "2", "protocol=fedavg", chosen % 2)


def test_the_metric_is_in_the_summary(tiny: Path, tmp_path: Path, printed: Callable[[str], Path]) -> None:
    scenario = resolved(tiny, "rounds=1", "training.warmup_rounds=0", f"evaluation.metrics=[{printed('A metric')}]")
    summary = in_process_run.run(scenario, tmp_path / "run").summary
    assert summary.metrics.keys() >= {"mrr_i2t", "mrr_t2i", "mrr"}
    assert summary.metrics["mrr"] >= summary.metrics["mean_r1"] > 0
    assert summary.custom_metrics["mrr"].title == "mean reciprocal rank, mean"


@pytest.mark.slow
def test_the_data_set_is_read_and_trained_on(tiny: Path, tmp_path: Path, printed: Callable[[str], Path]) -> None:
    entries = []
    for number in range(20):
        data_set_folders.photo(tmp_path / "set" / "photos" / f"{number}.png", number)
        entries.append({"file": f"{number}.png", "class": f"{number % 2}", "text": f"picture number {number}"})
    data_set_folders.write(tmp_path / "set" / "list.json", json.dumps(entries))
    raw = yaml.safe_load(tiny.read_text()) | {
        "protocol": "fedavg",
        "rounds": 1,
        "training": {},
        "data": {"name": str(printed("A data set")), "path": str(tmp_path / "set")},
        "backbone": {"name": "lite"},
        "silos": {"count": 2},
        "partition": {"kind": "iid"},
        "missing_modality": {},
    }
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(raw))
    summary = in_process_run.run(resolved(file), tmp_path / "run").summary
    assert sum(each.samples for each in summary.per_silo.values()) == 16, "the training items of an 80/10/10 split"


def test_the_transport_carries_a_run(tiny: Path, tmp_path: Path) -> None:
    """`tests/test_wire_transports.py` runs the conformance tests on it, under its scheme."""
    scheme = queue_transport.TRANSPORT.form.partition("://")[0]
    scenario = resolved(tiny, "rounds=1", "training.warmup_rounds=0")
    summary = threaded_run.run(scenario, tmp_path / "queues", scheme=scheme).summary
    assert summary is not None
    assert summary.model_digest == in_process_run.run(scenario, tmp_path / "calls").summary.model_digest


# ----------------------------------------------------------------------------------- lines for files of this project
def inserted(text: str, where: str, anchor: str, code: str) -> str:
    """A file's text with a block above, or at the end of, the one line that begins with ``anchor``."""
    lines = text.splitlines()
    (row,) = [row for row, line in enumerate(lines) if line.lstrip().startswith(anchor)]
    if where == "above":
        indent = lines[row][: len(lines[row]) - len(lines[row].lstrip())]
        lines[row:row] = [indent + line if line else line for line in code.splitlines()]
    else:
        lines[row] += code.strip() if code.startswith(",") else f" {code.strip()}"
    return "\n".join(lines) + "\n"


@pytest.fixture
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of fedmq with the payload, the command and the fault that are printed."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "fedmq", root / "fedmq")
    for heading in ("A payload", "A command", "A fault"):
        for intro, code in blocks(recipe(heading), heading):
            if new := NEW_FILE.search(intro):
                assert not (root / new[1]).exists()
                (root / new[1]).write_text(code)
            else:
                found = INSERTION.search(intro)
                assert found is not None, intro
                path = root / found[1]
                path.write_text(inserted(path.read_text(encoding="utf-8"), found[2], found[3], code), encoding="utf-8")
    return root


def python(copy: Path, *arguments: object) -> str:
    """Output of a Python process that imports the copy of fedmq, and the other packages from here."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{ROOT}"},
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PAYLOAD_AND_FAULT = """
from fedmq.audit.policy import Rule
from fedmq.wire.codec import decode, encode_body, encode_header
from fedmq.wire.fields import FieldError
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import PAYLOADS, GradientNorm, Refusal

assert PAYLOADS["gradient_norm"] is GradientNorm
header = Header(run="r", kind=Kind.REPLY, sender="silo-00", receiver="coordinator", sequence=1, reply_to=1, sent_at=0.0)
body = b"".join(encode_body(Message(header, (GradientNorm(0.5),))))
(got,) = decode(encode_header(header), body).payloads
assert type(got) is GradientNorm and got.value == 0.5
assert Rule(kinds=["gradient_norm"]).kinds == ["gradient_norm"]
assert Refusal("kinds", "gradient_norm").withheld == "gradient_norm"
try:
    GradientNorm(-2.0)
except FieldError as error:
    assert str(error).startswith("gradient_norm.value: -2.0"), error
from fedmq.config.faults import FAULTS
from fedmq.federation.faults import FaultSchedule
from fedmq.federation.protocol import SiloFacts

slow = FAULTS["slow"](times=3.0, silos=["silo-01"])
schedule = FaultSchedule((slow,), 0, tuple(SiloFacts(f"silo-0{index}", index, True, True) for index in range(2)))
for silo in ("silo-00", "silo-01"):
    outcome, hits = schedule.outcome(silo, 1, 0, 100.0, 10.0)
    assert (outcome.due, len(hits)) == ((110.0, 0) if silo == "silo-00" else (130.0, 1))
"""
COMMANDS = """
from typer.testing import CliRunner
from fedmq.cli.main import app

for words in {commands!r}:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    print(done.output)
"""


@pytest.mark.slow
def test_a_payload_a_fault_and_a_command_are_each_declared_in_one_place(copy: Path, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ["--set", "launcher=inline", "--set", "faults=[{kind: slow, times: 3, rounds: 0-}]"]
    commands = (
        ["scenario", str(tiny), *settings, "--out", str(out), "--quiet"],
        ["seconds", str(out)],
        ["seconds", "--help"],
    )
    shown = python(copy, "-c", PAYLOAD_AND_FAULT + COMMANDS.format(commands=commands))
    assert {note["kind"] for note in in_process_run.notes(out, LogEvent.FAULT)} == {"slow"}
    seconds = json.loads(RunFolder(out).summary.read_text())["seconds"]["total"]
    assert f"\n{seconds:.1f}\n" in shown
    assert "how long a finished run took" in shown
