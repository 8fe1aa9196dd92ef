"""The files in ``deploy/``: they parse, name commands and options that exist, and their commands complete a run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from benchmarks.attacks import free_port
from fedmq.audit.log_checks import audit_run
from fedmq.cli.console import BAD_INPUT
from fedmq.cli.main import app
from fedmq.config.scenario import Scenario
from tests import in_process_run
from tests.threaded_run import resolved
from tests.waiting import PATIENCE, wait_for_merges

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
FEDMQ = Path(sys.executable).parent / "fedmq"


def test_the_scenario_of_the_four_terminals_has_the_silos_that_are_started() -> None:
    page = (ROOT / "docs" / "howto" / "deploy.md").read_text().partition("## Four terminals")[2].partition("\n## ")[0]
    (text,) = re.findall(r"(?:^ {4}\w+: .*\n)+", page, flags=re.MULTILINE)
    scenario = Scenario.model_validate(yaml.safe_load(text))
    assert list(scenario.silo_names) == re.findall(r"^ {4}fedmq silo two\.yaml --name (\S+)", page, flags=re.MULTILINE)
    assert f"fedmq keys init keys --silos {scenario.silos.count}\n" in page


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


def kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / "fedmq.yaml").read_text()))


def as_fedmq(words: list[str]) -> list[str]:
    """The arguments of ``fedmq`` of a command, which may be the script ``fedmq-coordinator``."""
    program, *arguments = words
    if Path(program).name == "fedmq-coordinator":
        scenario, run, *options = arguments
        return ["coordinator", scenario, "--out", run, *options]
    return arguments if Path(program).name == "fedmq" else words


def commands() -> Iterator[tuple[str, list[str]]]:
    for name, service in compose()["services"].items():
        yield f"compose {name}", as_fedmq([*service.get("entrypoint", ["fedmq"]), *service["command"]])
    for document in kubernetes():
        if document["kind"] == "Job":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            words = [*container.get("command", ["fedmq"]), *container["args"]]
            yield f"kubernetes {document['metadata']['name']}", as_fedmq(words)
    for unit in UNITS:
        (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        yield f"systemd {unit.name}", as_fedmq(shlex.split(line))


@pytest.mark.parametrize(("where", "arguments"), [pytest.param(*each, id=each[0]) for each in commands()])
def test_every_command_exists_with_these_options(where: str, arguments: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        assert name in command.commands, f"{where}: {name}"
        command = command.commands[name]
    # Parses as the program would, and runs nothing; a missing or unknown option raises.
    command.make_context(name, arguments)


def test_the_units_are_valid_to_systemd(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in UNITS:
        # With programs that exist on this machine.
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
        path = tmp_path / unit.name
        path.write_text(text)
        done = subprocess.run([analyze, "verify", "--man=no", str(path)], capture_output=True, text=True, check=False)
        ours = [
            line for line in done.stderr.splitlines() if unit.name.partition("@")[0].removesuffix(".service") in line
        ]
        assert not ours, done.stderr


def test_a_process_that_refuses_its_input_is_not_started_again() -> None:
    for unit in UNITS:
        assert f"RestartPreventExitStatus={BAD_INPUT}\n" in unit.read_text(), unit.name


def test_the_units_use_only_variables_that_the_environment_file_sets() -> None:
    set_here = set(re.findall(r"^(\w+)=", (DEPLOY / "systemd" / "fedmq.env").read_text(), re.MULTILINE))
    for unit in UNITS:
        assert set(re.findall(r"\$\{(\w+)\}", unit.read_text())) <= set_here


def test_the_kubernetes_objects_are_valid_by_kubernetes_own_schemas() -> None:
    import kubernetes_validate

    for document in kubernetes():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_kubernetes_objects_refer_to_each_other_and_mount_what_they_declare() -> None:
    documents = kubernetes()
    claims = {each["metadata"]["name"] for each in documents if each["kind"] == "PersistentVolumeClaim"}
    jobs = [each for each in documents if each["kind"] == "Job"]
    (service,) = (each for each in documents if each["kind"] == "Service")
    assert {each["apiVersion"] for each in documents} == {"v1", "batch/v1"}
    labels = [job["spec"]["template"]["metadata"]["labels"] for job in jobs]
    assert labels.count(service["spec"]["selector"]) == 1
    for job in jobs:
        pod = job["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in (*pod["containers"], *pod["initContainers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        used = {
            each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each
        }
        assert used <= claims
        assert pod["restartPolicy"] == "OnFailure"


def test_the_image_has_the_packages_of_the_wheel_and_does_not_run_as_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \w+$", text, re.MULTILINE))
    assert {"fedmq", "protocols", "silos", "coordinator"} <= copied
    assert all((ROOT / name).exists() for name in re.findall(r"^COPY ([\w./-]+) ", text, re.MULTILINE))
    assert re.search(r"^USER fedmq$", text, re.MULTILINE)


@pytest.mark.longest
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_compose_file_complete_a_run_also_after_the_coordinator_was_killed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    here = {
        "/scenarios/smoke.yaml": str(tiny),
        "/keys": str(tmp_path / "keys"),
        "/runs/compose": str(tmp_path / "run"),
        "tcp://*:5555": f"tcp://127.0.0.1:{port}",
        "tcp://coordinator:5555": f"tcp://127.0.0.1:{port}",
        "fedmq-coordinator": str(DEPLOY / "fedmq-coordinator"),
        "fedmq": str(FEDMQ),
    }
    monkeypatch.setenv("FEDMQ", str(FEDMQ))
    services = compose()["services"]

    def words(name: str) -> list[str]:
        service = services[name]
        return [here.get(word, word) for word in (*service.get("entrypoint", ["fedmq"]), *service["command"])]

    subprocess.run(words("keys"), check=True, capture_output=True)
    started: dict[str, subprocess.Popen[bytes]] = {}
    rounds = ["--set", "rounds=12"]
    try:
        for name in services:
            if name != "keys":
                started[name] = subprocess.Popen([*words(name), *rounds])
        wait_for_merges(tmp_path / "run", 3)
        started["coordinator"].kill()
        started["coordinator"].wait()
        started["coordinator"] = subprocess.Popen([*words("coordinator"), *rounds])
        codes = {name: process.wait(timeout=PATIENCE) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    assert set(codes.values()) == {0}, codes
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["versions"] == 12
    assert summary["processes"]["silos"] == 3
    expected = in_process_run.run(resolved(tmp_path / "run" / "scenario.yaml"), tmp_path / "expected").summary
    assert summary["model_digest"] == expected.model_digest
    assert not audit_run(tmp_path / "run").findings


def test_the_compose_file_has_three_silos_that_share_the_network_of_the_coordinator() -> None:
    services = compose()["services"]
    silos = [name for name in services if name.startswith("silo-")]
    assert silos == ["silo-00", "silo-01", "silo-02"]
    networks = set(compose()["networks"])
    for name in (*silos, "coordinator", "evaluator"):
        assert set(services[name]["networks"]) <= networks
        assert services[name]["image"] == "fedmq"
        assert all(len(volume.split(":")) in (2, 3) for volume in services[name]["volumes"])
    assert services["coordinator"]["ports"] == ["127.0.0.1:5555:5555"]
