"""``fedmq preflight``: each check that fails says so, and nothing is written."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from coordinator.program import CoordinatorArguments, run_coordinator
from fedmq.cli import main as cli
from fedmq.cli.scenarios import print_results
from fedmq.config.scenario import Scenario
from fedmq.federation.preflight import Program, Result, Verdict
from fedmq.launch import preflight as module
from fedmq.launch.preflight import Starting
from fedmq.packages import versions
from fedmq.wire.keys import init_keys
from silos.tasks import SiloArguments
from tests.own_data_sites import COMMON, HOSPITALS, IMAGE_ONLY, arrays, of_hospital
from tests.threaded_run import resolved, run_of
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow


def uri_of(keys: Path) -> str:
    """The address of a test: its folder has a name of its own."""
    return f"memory://{keys.parent.name}"


@pytest.fixture
def scenario(tiny: Path) -> Scenario:
    return resolved(tiny, "missing_modality.silos={silo-01: text}")


@pytest.fixture
def keys(scenario: Scenario, tmp_path: Path) -> Path:
    init_keys(tmp_path / "keys", ("coordinator", "evaluator", *scenario.silo_names))
    return tmp_path / "keys"


@pytest.fixture
def running(scenario: Scenario, keys: Path, tmp_path: Path) -> Iterator[None]:
    """A coordinator that waits for its silos."""
    listening, over = threading.Event(), threading.Event()
    arguments = CoordinatorArguments(run_of(scenario), uri_of(keys), keys, tmp_path / "run")
    options = {"listening": lambda _: listening.set(), "stop_wanted": over.is_set}
    thread = threading.Thread(target=run_coordinator, args=(arguments,), kwargs=options)
    thread.start()
    assert listening.wait(PATIENCE)
    yield
    over.set()
    thread.join()


def arguments(scenario: Scenario, keys: Path, out: Path, name: str = "silo-00") -> SiloArguments:
    return SiloArguments(run_of(scenario), name, uri_of(keys), keys, out)


def preflight(silo: SiloArguments) -> dict[str, Result]:
    results = module.preflight(Program.PREFLIGHT, Starting(silo.run, silo))
    return {result.name: result for result in results}


@pytest.mark.usefixtures("running")
def test_all_checks_pass_for_a_silo_that_can_join(scenario: Scenario, keys: Path, tmp_path: Path) -> None:
    found = preflight(arguments(scenario, keys, tmp_path / "silo"))
    wanted = ["versions", "keys", "coordinator", "coordinator's versions", "data", "disk", "training step", "memory"]
    assert list(found) == wanted
    assert {check.verdict for check in found.values()} == {Verdict.OK}, found
    assert f"accepts this key, this scenario ({run_of(scenario).id})" in found["coordinator"].detail
    assert "gathering, round 0 of 4" in found["coordinator"].detail
    assert "images and captions" in found["data"].detail
    assert " s per task of " in found["training step"].detail
    assert not (tmp_path / "silo").exists(), "nothing is written"
    captions = preflight(arguments(scenario, keys, tmp_path / "silo", "silo-01"))
    assert "captions only" in captions["data"].detail


@pytest.mark.usefixtures("running")
def test_the_coordinator_refuses_another_run_and_an_unknown_key(
    tiny: Path, scenario: Scenario, keys: Path, tmp_path: Path
) -> None:
    other = resolved(tiny, "missing_modality.silos={silo-01: text}", "seed=5")
    found = preflight(arguments(other, keys, tmp_path / "silo"))
    assert found["coordinator"].verdict is Verdict.FAILED
    differs = f"it runs another scenario: {run_of(scenario).id}, here {run_of(other).id}, with other values of seed;"
    assert differs in found["coordinator"].detail
    own = tmp_path / "own"
    init_keys(own, ("silo-00",))
    (own / "accepted" / "coordinator.pub").write_bytes((keys / "accepted" / "coordinator.pub").read_bytes())
    stranger = preflight(arguments(scenario, own, tmp_path / "silo"))
    assert stranger["coordinator"].verdict is Verdict.FAILED
    assert "does not accept this key of silo-00" in stranger["coordinator"].detail
    assert "coordinator's versions" not in stranger


@pytest.mark.usefixtures("running")
def test_versions_other_than_the_coordinators_are_shown_and_do_not_fail(
    scenario: Scenario, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "versions", lambda: {**versions(), "fedmq": "9.9"})
    found = preflight(arguments(scenario, keys, tmp_path / "silo"))["coordinator's versions"]
    assert (found.verdict, found.detail.startswith("fedmq ")) == (Verdict.DIFFERS, True)
    assert "there, 9.9 here" in found.detail


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
def test_what_is_missing_is_named(
    scenario: Scenario, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = preflight(arguments(scenario, tmp_path / "nothing", tmp_path / "silo"))
    assert found["keys"].verdict is Verdict.FAILED
    assert found["coordinator"].verdict is Verdict.SKIPPED, "the coordinator answers no inquiry without a key"
    elsewhere = replace(arguments(scenario, tmp_path / "nothing", tmp_path / "silo"), connect="tcp://no..name:5555")
    found = preflight(elsewhere)
    assert found["coordinator"].verdict is Verdict.FAILED
    assert "the name no..name is unknown on this machine" in found["coordinator"].detail
    gone = scenario.model_copy(update={"data": scenario.data.model_copy(update={"path": tmp_path / "gone.npz"})})
    missing = replace(run_of(gone), source=replace(run_of(gone).source, scenario=gone))
    found = preflight(replace(arguments(gone, keys, tmp_path / "silo"), run=missing))
    assert found["coordinator"].verdict is Verdict.SKIPPED, "it does not run"
    assert found["data on disk"].verdict is Verdict.FAILED and "data" not in found
    assert "gone.npz" in found["data on disk"].detail
    for limit in ("_LOG_BYTES", "_SPARE_MEMORY"):
        monkeypatch.setattr(module, limit, 1e18)
    found = preflight(arguments(scenario, keys, tmp_path / "silo"))
    assert found["disk"].verdict is found["memory"].verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("up", "verdict", "detail"),
    [
        ({"kinds": ["delta"]}, Verdict.FAILED, "up.kinds: found 'a list without data_statement'"),
        ({"bytes_per_payload": {"delta": 10}}, Verdict.FAILED, "up.bytes_per_payload.delta allows 10"),
        ({"bytes_in_all": 10}, Verdict.FAILED, "up.bytes_in_all allows 10"),
        ({"bytes_per_message": 10**9}, Verdict.OK, "(delta 11.4 kB, "),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_the_policy_is_checked_against_what_the_silo_has_to_send(
    up: object, verdict: Verdict, detail: str, scenario: Scenario, keys: Path, tmp_path: Path
) -> None:
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump({"up": up}))
    strict = replace(arguments(scenario, keys, tmp_path / "silo"), policy=tmp_path / "policy.yaml")
    found = preflight(strict)
    assert found["policy"].verdict is verdict and detail in found["policy"].detail, found["policy"]


def test_the_command_exits_with_1_if_a_check_failed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("preflight", tiny, "--name", "silo-00", "--keys", tmp_path, "--json")
    monkeypatch.setattr("sys.argv", ["fedmq", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    found = json.loads(capfd.readouterr().out)
    assert [check["verdict"] for check in found if check["name"] == "keys"] == ["failed"]


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("name", "held"), [("silo-02", "images and captions ("), ("silo-01", "images only")])
def test_a_site_with_its_own_data_trains_a_step_before_there_is_an_agreement(
    name: str, held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"name": "own", **COMMON, "partition": {"kind": "own"}}))
    lacks = ("text", "text_present") if name == IMAGE_ONLY else ()
    hospital = of_hospital(arrays(), HOSPITALS[int(name[-1])])
    hospital["image"][1] = 0
    np.savez(tmp_path / "mine.npz", **{key: value for key, value in hospital.items() if key not in lacks})
    init_keys(tmp_path / "keys", ("coordinator", name))
    site = {"name": name, "data": {"name": "features", "path": "mine.npz"}, "keys": "keys", "out": "run"}
    (tmp_path / "silo.yaml").write_text(yaml.safe_dump(site | {"connect": f"ipc://{tmp_path}/nobody"}))
    words = ("preflight", tmp_path / "own.yaml", "--site", tmp_path / "silo.yaml", "--json")
    monkeypatch.setattr("sys.argv", ["fedmq", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    found = {check["name"]: check for check in json.loads(capfd.readouterr().out)}
    failed = [check for check in found.values() if check["verdict"] == "failed"]
    assert not failed and found["coordinator"]["verdict"] == "skipped"
    assert held in found["data"]["detail"]
    assert found["remark"]["verdict"] == "warning" and found["remark"]["detail"] == "1 image vector is zero"
    assert not (tmp_path / "run").exists()


def test_problems_of_preflight_have_a_column_that_says_how_to_fix_them(capsys: pytest.CaptureFixture[str]) -> None:
    made = [Result("keys", Verdict.FAILED, "no key", "fedmq keys create"), Result("disk", Verdict.OK, "enough")]
    assert print_results(made, Console(width=80))
    head, keys, disk = capsys.readouterr().out.splitlines()
    place = head.index("how to fix")
    assert keys[place:].strip() == "fedmq keys create" and keys.startswith("keys")
    assert disk[place:].strip() == "" and "ok: enough" in disk


def test_a_missing_file_or_folder_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    starts = ["scenario", "coordinator --keys keys", "silo", "evaluator", "preflight", "compare", "data check"]
    looks = ["audit", "status", "report", "replay", "prune", "curves", "cross", "tsne", "search"]
    code = (
        "import sys; from fedmq.cli import main\n"
        f"for command in {starts + looks}:\n"
        f"    sys.argv = ['fedmq', *command.split(), {str(tmp_path / 'none')!r}, *['text'] * (command == 'search')]\n"
        "    try: main.main()\n    except SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"] * len(starts + looks)
    assert done.stderr.count("none: found 'no such file'") == len(starts)
    assert done.stderr.count("none: found 'no such folder'") == len(looks)


def test_a_check_refuses_what_only_a_run_on_this_machine_can_do(tiny: Path) -> None:
    scenario = resolved(tiny, "launcher=ray", "wire.transport=shm")
    found = {each.name: each for each in module.preflight(Program.CHECK, Starting(run_of(scenario)))}
    assert found["launcher"].verdict is Verdict.FAILED
    assert "found 'shm', allowed: ipc with launcher ray" in found["launcher"].detail
