"""``fedmq status`` and ``prune``, progress, metrics for Prometheus, digests of data, and silos that stay."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import socket
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from benchmarks.attacks import free_port
from fedmq.audit.log_checks import audit_run
from fedmq.cli import terminal
from fedmq.cli.compare import display_progress
from fedmq.cli.scenarios import resolved_file
from fedmq.cli.stay import BY_POLICY, accepted_run
from fedmq.config.run_id import without_machine
from fedmq.config.site import read_site
from fedmq.config.yaml_files import dump
from fedmq.errors import InputError
from fedmq.experiments.process_pool import JobProgress
from fedmq.runs import prometheus
from fedmq.runs.resume import plan_pruning, prune
from fedmq.runs.status import Status, read_status
from fedmq.storage.logs import QUIET
from fedmq.storage.run_folder import RunFolder
from fedmq.text import size_text
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.command_line import completed, printed, refused
from tests.in_process_run import run
from tests.own_data_sites import COMMON, HOSPITALS, Sites, arrays, outputs
from tests.threaded_run import resolved
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("operate") / "run"
    assert run(resolved(tiny, "launcher=inline"), out).summary is not None
    return out


def test_status_shows_round_and_silos(finished: Path) -> None:
    shown = printed("status", finished)
    assert "done, round 4 of 4" in shown
    assert "silo-03" in shown
    read: dict[str, Any] = json.loads(printed("status", finished, "--json"))
    assert (read["round"], sorted(read["silos"])) == (4, [f"silo-0{index}" for index in range(4)])
    assert read["silos"]["silo-00"]["up"] > 0
    assert sum(silo["up"] for silo in read["silos"].values()) <= read["up"]


def test_a_live_run_with_errors_names_them_without_control_characters(finished: Path, tmp_path: Path) -> None:
    plain = json.loads((finished / "status.json").read_text())
    plain |= {"phase": "collecting", "written": "2020-01-01T00:00:00.000+00:00"}
    plain["silos"]["silo-02"] |= {"phase": "overdue", "error": "bad\x1b[2J disk"}
    (tmp_path / "scenario.yaml").write_text((finished / "scenario.yaml").read_text())
    (tmp_path / "status.json").write_text(json.dumps(plain))
    shown = completed("status", tmp_path)
    assert shown.returncode == 0
    assert "overdue" in shown.stdout
    assert "\x1b[2J" not in shown.stdout
    assert "the coordinator is busy or not running" in shown.stderr
    plain["silos"]["silo-02"]["phase"] = "asleep"
    (tmp_path / "status.json").write_text(json.dumps(plain))
    assert "silos.silo-02.phase" in refused("status", tmp_path)


def test_the_status_of_a_run_that_has_not_started_says_so(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "messages").mkdir()  # a silo has started its log
    assert "no scenario.yaml in it: the run has not started yet" in refused("status", tmp_path)
    (tmp_path / "scenario.yaml").write_text((finished / "scenario.yaml").read_text())
    assert "no status.json in it: the run has not started yet" in refused("status", tmp_path)


@pytest.mark.slow
def test_prune_removes_checkpoints_and_states_of_a_finished_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run(resolved(tiny, "launcher=inline"), out)
    before = sum(path.stat().st_size for path in {p.resolve() for p in out.rglob("*")} if path.is_file())
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115, PTH123
    assert completed("prune", out).returncode != 0
    assert any((out / "checkpoints").glob("version-*")), "not without a yes"
    freed = plan_pruning(RunFolder(out), personalised=False).size
    assert printed("prune", out, "--yes").startswith(f"{size_text(freed)} freed")
    assert not (out / "checkpoints").exists()
    after = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert 0 < freed <= before - after, "hard links count once"
    assert not audit_run(out).findings
    assert "nothing to remove" in printed("prune", out, "--yes")


def test_prune_keeps_what_search_with_a_personal_model_needs(tiny: Path, tmp_path: Path) -> None:
    run(resolved(tiny, "launcher=inline"), tmp_path)
    folder = RunFolder(tmp_path)
    (newest,) = [path for path in folder.checkpoints.glob("version-*") if path.name == "version-000004"]
    pruning = plan_pruning(folder, personalised=True)
    prune(folder, pruning)
    assert "search --silo" in pruning.kept
    assert newest.is_dir()
    assert len(list(folder.checkpoints.glob("version-*"))) == 1
    states = list((folder.checkpoints / "silos").glob("*/*.safetensors"))
    assert len({path.parent for path in states}) == len(states) == 4, "one per silo"


def test_an_unfinished_run_is_not_pruned(tiny: Path, tmp_path: Path) -> None:
    steps = iter(range(1000))
    run(resolved(tiny, "launcher=inline"), tmp_path, stop_wanted=lambda: next(steps) > 12)
    with pytest.raises(InputError, match="an unfinished one needs its checkpoints"):
        plan_pruning(RunFolder(tmp_path), personalised=False)


def test_prometheus_reads_the_figures_of_the_latest_status(finished: Path) -> None:
    status = read_status(finished / "status.json")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match="--metrics-port"):
            prometheus.serve(port, lambda: status)
    close = prometheus.serve(port, lambda: status)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
            text = answer.read().decode()
    finally:
        close()
    assert "fedmq_round 4.0" in text
    assert 'fedmq_silos{phase="done"} 4.0' in text
    assert f'fedmq_payload_bytes_total{{direction="up"}} {float(status.up)}' in text
    assert 'fedmq_metric{metric="mean_r1"}' in text


def test_metrics_are_not_served_under_another_name() -> None:
    port = free_port()
    close = prometheus.serve(port, lambda: None)

    def status_for(host: str) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    try:
        own = (f"127.0.0.1:{port}", "localhost", "[::1]:9400", "192.0.2.1")
        assert [status_for(host) for host in own] == [200] * len(own)
        assert [status_for(host) for host in ("rebound.example", f"rebound.example:{port}", "127.0.0.1.example")] == [
            403
        ] * 3
    finally:
        close()


# ---------------------------------------------------------------------------------------- the digest of a site's data
def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def of_features(values: np.ndarray[Any, Any]) -> bytes:
    """The digest of an item's image or captions, from the description of data_statement."""
    shape = f"({', '.join(map(str, values.shape))}{',' if values.ndim == 1 else ''})"
    return sha256(f"float32 {shape}\0".encode() + values.astype("<f4").tobytes())


def salted(found: dict[str, np.ndarray[Any, Any]], run: str) -> str:
    """The salted digest of a file of vectors, from the description of data_statement."""
    content = f"fedmq data\0{run}\0".encode()
    for row, key in enumerate(found["keys"]):
        head = [str(key), str(found["split"][row]), [str(found["label_names"][found["labels"][row]])]]
        content += sha256(json.dumps(head).encode())
        content += of_features(np.where(found["image_present"][row], found["image"][row], 0))
        content += of_features(np.where(found["text_present"][row], found["text"][row : row + 1], 0))
    return sha256(content).hex()


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    np.savez(tmp_path / "all.npz", **(arrays(60) | {"keys": np.array([f"é-{row}" for row in range(60)])}))
    path = tmp_path / "column.yaml"
    partition = {"kind": "column", "column": "hospital"}
    data = {"name": "features", "path": str(tmp_path / "all.npz")}
    path.write_text(yaml.safe_dump({"name": "column", **COMMON, "partition": partition, "data": data}))
    return path


def test_the_digest_and_numbers_that_processes_state_are_printed_from_a_scenario(scenario: Path) -> None:
    record = json.loads(printed("data", "digest", scenario, "--json"))
    with np.load(scenario.parent / "all.npz") as file:
        found = dict(file)
    expected = salted(found, record["run"])
    assert {stated["data_digest"] for stated in record["stated"].values()} == {expected}
    assert set(record["stated"]) == {"evaluator", "silo-00", "silo-01", "silo-02"}
    trained = (found["split"] == "train") & (found["hospital"] == "berlin")
    assert record["stated"]["silo-00"]["items"]["train"] == {
        "paired": int(trained.sum()), "image_only": 0, "text_only": 0
    }  # fmt: skip
    assert printed("data", "digest", scenario) == f"{expected}  {record['run']}\n"


def test_a_site_file_is_refused_in_a_simulated_partition_and_needed_elsewhere(scenario: Path) -> None:
    told = refused("data", "digest", scenario, "--site", "silo.yaml")
    assert "--site: found 'silo.yaml', allowed: no site file" in told
    own = scenario.with_name("own.yaml")
    own.write_text(yaml.safe_dump({"name": "own", **COMMON, "partition": {"kind": "own"}}))
    assert "--site: found 'not given', allowed: a site file" in refused("data", "digest", own)


# ----------------------------------------------------------------------------------- silos that stay for several runs
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
            assert audit.payloads.number["silo-00"]["loss"]
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


def test_a_scenario_that_is_not_that_of_the_run_or_names_a_file_is_refused(
    offered: tuple[str, str], tmp_path: Path
) -> None:
    for was, now, message in (
        ("rounds: 3", "rounds: 4", "that of the run own-"),
        ("name: rcsr", "name: ./mine.py", "mine.py"),
        ("rounds: 3", "rounds: [", "offered"),
    ):
        assert was in offered[1]
        with pytest.raises(InputError, match=message):
            accepted_run(offered[0], offered[1].replace(was, now), tmp_path, [BY_POLICY], QUIET)


def test_options_of_a_standing_silo_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "keys: keys\nout: run\nconnect: tcp://127.0.0.1:1\n"
    (tmp_path / "NAMELESS").write_text(text)
    (tmp_path / "SITE").write_text(f"{text}name: silo-00\n")
    monkeypatch.chdir(tmp_path)
    for options, message in (
        ("--stay", "--stay: found"),
        (f"--accept {BY_POLICY}", "--accept: found 'policy', allowed: with --stay only"),
        ("", "FILE: found 'no scenario'"),
        ("--stay --site SITE --seed 1", "--stay: found"),
        ("--stay --site SITE --accept 1", "--accept: found '1'"),
        (f"--stay --site SITE --accept {BY_POLICY}", "with a policy"),
        ("--stay --site NAMELESS", "name: found 'nothing'"),
    ):
        assert message in refused("silo", *options.split()), options


# -------------------------------------------------------------------------------------------------- progress of a run
def test_a_terminal_that_cannot_move_its_cursor_shows_progress_as_lines(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200)
    with terminal.display(resolved(tiny), console, quiet=False) as show:
        show(Status("collecting", 3, 4, 4, (), ({}, ""), 4, 0, None, {}, 0, 0.0, 20.0))
    with display_progress(console, quiet=False) as report:
        report("runs", JobProgress(5, 12, (), None))
    assert "round 3/4" in screen.getvalue() and "runs: 5 of 12 done" in screen.getvalue()


def lines_of(tiny: Path, *statuses: Status) -> list[str]:
    """The lines after the title that a file shows of a run."""
    screen = io.StringIO()
    with terminal.display(resolved(tiny), Console(file=screen, width=200), quiet=False) as show:
        for status in statuses:
            show(status)
    return screen.getvalue().splitlines()[1:]


def test_missing_processes_are_named_and_refused_frames_are_counted(tiny: Path) -> None:
    names, wrong = (
        ("silo-02", "silo-03", "evaluator"),
        ({"wrong_run": 4, "bad_signature": 3}, "unknown: run [red]a, here b\nround 4/4"),
    )
    waiting = [
        Status("gathering", 0, 4, 0, missing, wrong, 2, 0, None, {}, 0, 0.0, elapsed)
        for elapsed, missing in ((1.0, names), (2.5, names), (3.0, names[2:]), (13.0, names[2:]))
    ]
    shown = lines_of(tiny, *waiting, Status("collecting", 0, 4, 4, (), wrong, 4, 0, None, {}, 0, 0.0, 14.0))
    refused_frames = "3 bad_signature, 4 wrong_run; the last: unknown: run [red]a, here b\\nround 4/4"
    assert shown[:2] == [
        f"waiting for silo-02, silo-03 and the evaluator  refused: {refused_frames}",
        f"waiting for the evaluator  refused: {refused_frames}",
    ]
    assert shown[2].startswith("round 0/4  silos: 4 training") and shown[2].endswith(f"refused: {refused_frames}")
    assert (
        terminal.name_some([f"silo-{n:02d}" for n in range(30)])
        == "silo-00, silo-01, silo-02, silo-03, silo-04 and 25 more"
    )


def test_an_evaluator_that_is_not_connected_is_named_during_the_rounds(tiny: Path) -> None:
    statuses = [
        Status("collecting", 1, 4, 3, missing, ({}, ""), 4, 0, None, {}, 0, 0.0, 20.0 * number)
        for number, missing in enumerate((("silo-02", "evaluator"), ("silo-02",)))
    ]
    shown = [line.partition("  not connected: ")[2] for line in lines_of(tiny, *statuses)]
    assert shown == ["the evaluator", ""]
    for status, name in zip(statuses, shown, strict=True):
        screen = io.StringIO()
        Console(file=screen, width=200).print(terminal.status_table(status, "-", "tiny"))
        assert ("not connected" in screen.getvalue()) == bool(name)


def test_the_last_refusal_is_shown_with_its_age_and_only_for_a_minute(tiny: Path) -> None:
    wrong = ({"unknown_sender": 8}, "silo-09: no such key")
    statuses = [
        Status("collecting", 1, 4, 3, (), wrong, 4, 0, None, {}, 0, 0.0, at, refused_ago=ago)
        for at, ago in ((20.0, 0.2), (40.0, 34.0), (60.0, 61.0))
    ]
    assert [line.partition("  refused: ")[2] for line in lines_of(tiny, *statuses)] == [
        "8 unknown_sender; the last: silo-09: no such key",
        "8 unknown_sender; the last, 34 s ago: silo-09: no such key",
        "",
    ]


def test_silos_that_the_run_waits_for_are_named(tiny: Path) -> None:
    base = Status("collecting", 3, 4, 4, (), ({}, ""), 4, 0, None, {}, 0, 0.0, 20.0)
    slow = (("silo-02", 95.4, 120.0), ("silo-01", 31.0, None))
    assert terminal.waited_for(base) == ""
    named = "silo-02, training for 95 s (limit 120 s); silo-01, training for 31 s"
    shown = terminal.waited_for(replace(base, slow=slow, overdue=("silo-00",)))
    assert shown == f"{named}; silo-00, without a reply within the limit"
    gathering = replace(base, phase="gathering", missing=("silo-03",), online=1, minimum=2)
    assert terminal.waited_for(gathering) == "silo-03; starts with 2 silos, joined: 1"
    (line,) = lines_of(tiny, replace(base, slow=slow[:1]))
    assert "waiting for silo-02, training for 95 s (limit 120 s)" in line


def test_metrics_are_shown_with_the_round_that_they_are_of(tiny: Path) -> None:
    status = Status("collecting", 7, 9, 2, (), ({}, ""), 4, 0, 0.5, {"mean_r1": 0.25}, 0, 0.0, 20.0, metrics_round=4)
    (line,) = lines_of(tiny, status)
    assert "round 7/9" in line and "R@1 0.250 (of round 4)" in line
    screen = io.StringIO()
    Console(file=screen, width=200).print(terminal.status_table(status, "-", "title"))
    assert "R@1 0.250 (of round 4)" in screen.getvalue()
