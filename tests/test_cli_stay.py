"""A standing silo takes part in one run after the other, in a folder for each, if its site accepted the scenario."""

from __future__ import annotations

import hashlib
import signal
import threading
from pathlib import Path

import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.cli.scenarios import resolved_file
from fedmq.cli.stay import BY_POLICY, accepted_run
from fedmq.config.run_id import without_machine
from fedmq.config.site import read_site
from fedmq.config.yaml_files import dump
from fedmq.errors import InputError
from fedmq.storage.logs import QUIET
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.command_line import fedmq
from tests.own_data_sites import HOSPITALS, Sites, outputs
from tests.waiting import PATIENCE

POLICY = Path(__file__).parents[1] / "docs" / "policies" / "own_sites.yaml"


@pytest.mark.slow
def test_one_silo_stays_for_two_runs_of_one_scenario_and_a_third_of_another(tmp_path: Path) -> None:
    sites = Sites(tmp_path, f"ipc://{tmp_path}/wire", site={0: {"policy": str(POLICY)}})
    sites.write()
    standing = sites.start("silo", "--site", "silo.yaml", "--stay", "--accept", BY_POLICY, folder="berlin")

    def other(index: int, number: int) -> threading.Thread:
        folder, run = tmp_path / HOSPITALS[index], resolved_file(sites.scenario, list(sites.settings), manual=True)
        place = (f"silo-{index:02d}", sites.uri, folder / "keys", folder / f"run-{number}")
        arguments = SiloArguments(run, *place, site=read_site(folder / "silo.yaml"))
        thread = threading.Thread(target=run_silo, args=(arguments,), daemon=True)
        thread.start()
        return thread

    try:
        for number, settings in enumerate([(), (), ("seed=1",)]):
            sites.settings = settings
            out, keys = tmp_path / f"run-{number}", str(tmp_path / "coordinator" / "keys")
            where = ("--keys", keys, "--bind", sites.uri, "--out", str(out))
            coordinator = sites.start("coordinator", str(sites.scenario), *where, folder="coordinator")
            threads = [other(index, number) for index in (1, 2)]
            (printed,) = outputs([coordinator])
            assert coordinator.returncode == 0, printed
            for thread in threads:
                thread.join(PATIENCE)
            others = (tmp_path / HOSPITALS[index] / f"run-{number}" for index in (1, 2))
            audit = audit_run(out, elsewhere=[tmp_path / "berlin" / "run", *others])
            assert (audit.findings, list(audit.absent)) == ([], [])
            assert audit.sent["silo-00"]["loss"]
    finally:
        standing.send_signal(signal.SIGTERM)
        (said,) = outputs([standing])
    assert "it continues" in said and "Traceback" not in said
    folders = [path.name for path in (tmp_path / "berlin" / "run").iterdir()]
    assert len(folders) == 4 and "scenarios" in folders  # two runs have one scenario, and so one id
    assert len({name.rpartition("-")[0] for name in folders}) == 3


@pytest.fixture
def offered(tmp_path: Path) -> tuple[str, str]:
    """The id of a run, and its scenario as the coordinator offers it."""
    sites = Sites(tmp_path / "sites", "ipc://nowhere")
    sites.write()
    run = resolved_file(sites.scenario, manual=True)
    return run.id, dump(without_machine(run.scenario.model_dump(mode="json")))


def test_a_scenario_is_accepted_once_by_its_digest_by_the_policy_or_on_the_terminal(
    offered: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = hashlib.sha256(offered[1].encode()).hexdigest()
    monkeypatch.setattr("sys.stdin", (tmp_path / "sites" / "own.yaml").open())
    assert accepted_run(*offered, tmp_path / "none", ["0" * 64], QUIET) is None
    assert (tmp_path / "none" / "scenarios" / f"{digest}-offered.yaml").read_text() == offered[1]
    for accept in (digest, BY_POLICY):
        for given in ([accept], []):  # it is remembered
            run = accepted_run(*offered, tmp_path / accept, given, QUIET)
            assert run is not None and run.id == offered[0]
    monkeypatch.setattr("fedmq.cli.stay._terminal", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    assert accepted_run(*offered, tmp_path / "terminal", [], QUIET) is not None
    assert offered[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rounds: 3", "rounds: 4"), "that of the run own-"),
        (("name: rcsr", "name: ./mine.py"), "mine.py"),
        (("rounds: 3", "rounds: ["), "offered"),
    ],
)
def test_a_scenario_that_is_not_that_of_the_run_or_names_a_file_is_refused(
    offered: tuple[str, str], tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in offered[1]
    with pytest.raises(InputError, match=message):
        accepted_run(offered[0], offered[1].replace(*change), tmp_path, [BY_POLICY], QUIET)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stay"], "--stay: found"),
        (["--accept", BY_POLICY], "--accept: found 'policy', allowed: with --stay only"),
        ([], "FILE: found 'no scenario'"),
        (["--stay", "--site", "SITE", "--seed", "1"], "--stay: found"),
        (["--stay", "--site", "SITE", "--accept", "1"], "--accept: found '1'"),
        (["--stay", "--site", "SITE", "--accept", BY_POLICY], "with a policy"),
        (["--stay", "--site", "NAMELESS"], "name: found 'nothing'"),
    ],
)
def test_options_of_a_standing_silo_that_do_not_fit_are_refused(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "keys: keys\nout: run\nconnect: tcp://127.0.0.1:1\n"
    (tmp_path / "NAMELESS").write_text(text)
    (tmp_path / "SITE").write_text(f"{text}name: silo-00\n")
    monkeypatch.chdir(tmp_path)
    assert fedmq(monkeypatch, "silo", *options) == 2
    assert message in capfd.readouterr().err
