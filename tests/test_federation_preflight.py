"""What is wrong with a scenario's names and paths is reported before torch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedmq.config.resolve import read
from fedmq.errors import InputError
from fedmq.federation.preflight import Check, Outcome, Verdict, refuse, refuse_scenario, results
from fedmq.launch.preflight import CHECKS as LISTED
from fedmq.models.objective_registry import OBJECTIVES
from protocols import METHODS

WRONG = {
    "protocol: fedavgg\ndata: {name: openmoji}": "line 2: protocol.name: found 'fedavgg', allowed: did you mean",
    "protocol: fedavg\nobjective: infonce\ndata: {name: openmoji}": "line 3: objective.base: found 'infonce'",
    "protocol: fedavg\ndata: {name: foldr, path: .}": "line 3: data.name: found 'foldr', allowed: did you mean folder?",
    "protocol: fedavg\ndata: {name: folder, path: PLACE/gone}": "line 3: data.path: found '",
    "protocol: fedavg\ndata: {name: flickr8k, path: PLACE/empty}": "empty, which holds no file', allowed: an existing",
    "protocol: fedavg\ndata: {name: openmoji}\nroundz: 3": "line 4: roundz: found 'roundz'",
}
PROGRAM = """
import json, sys
from pathlib import Path
from fedmq.cli.scenarios import read_here
from fedmq.errors import InputError
said = []
for file in sys.argv[1:]:
    try:
        read_here(Path(file))
    except InputError as error:
        said.append(str(error))
print(json.dumps([said, "torch" in sys.modules]))
"""


def test_names_and_paths_are_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    files = [tmp_path / f"{number}.yaml" for number in range(len(WRONG))]
    for file, text in zip(files, WRONG, strict=True):
        file.write_text("name: e\n" + text.replace("PLACE", str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", PROGRAM, *files], capture_output=True, text=True, check=True)
    said, torch = json.loads(done.stdout)
    for line, expected in zip(said, WRONG.values(), strict=True):
        assert expected in line
    assert not torch


@pytest.mark.parametrize("name", [*METHODS.built_in(), "./mine.py"])
def test_each_method_passes(name: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(f"name: e\nprotocol: {name}\ndata: {{name: openmoji}}")
    refuse_scenario(read(tmp_path / "s.yaml"))


def test_the_same_objectives_are_known_as_to_the_registry(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("name: e\nprotocol: fedavg\nobjective: none_such\ndata: {name: openmoji}")
    with pytest.raises(InputError) as raised:
        refuse_scenario(read(tmp_path / "s.yaml"))
    assert f"one of {', '.join(OBJECTIVES.built_in())}" in str(raised.value)


def _fails(_: str) -> None:
    raise InputError("here", "a problem", "none")


CHECKS = (
    Check[str]("first", "mend the first", lambda subject: [Outcome(Verdict.OK, subject)]),
    Check[str]("second", "mend the second", _fails),
    Check[str]("third", "mend the third", lambda _: [Outcome(Verdict.WARNING, "odd")], needs=("second",)),
    Check[str]("fourth", "mend the fourth", lambda _: None, needs=("third",)),
    Check[str]("fifth", "mend the fifth", lambda _: [Outcome(Verdict.WARNING, "odd")], needs=("first",)),
)


def test_every_problem_is_reported_with_its_fix_and_what_needs_a_failed_check_is_not_made() -> None:
    made = [(result.name, result.verdict, result.fix) for result in results(CHECKS, "subject")]
    assert made == [
        ("first", Verdict.OK, ""),
        ("second", Verdict.FAILED, "mend the second"),
        ("fifth", Verdict.WARNING, "mend the fifth"),
    ]
    with pytest.raises(InputError, match="here"):
        refuse(CHECKS, "subject")


def test_every_check_that_can_fail_says_how_to_fix_it_and_needs_only_checks_before_it() -> None:
    before = set[str]()
    for check in LISTED:
        assert check.fix or check.name == "versions"
        assert set(check.needs) <= before
        before.add(check.name)
