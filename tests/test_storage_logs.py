"""Logs for operators: levels, formats, escaped values; no secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedmq.clock import WallClock
from fedmq.errors import InputError
from fedmq.storage.logs import QUIET, LogFormat, LogLevel, LogOptions, open_log
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.threaded_run import resolved, run, run_of


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_have_time_level_process_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.log"
    options = LogOptions(LogLevel.INFO, path, LogFormat.JSON, console=False)
    options.check()
    log = open_log(options, "silo-00")
    log.debug("left out")
    log.info("trained", task=3, seconds=1.5)
    log.warning("no answer")
    first, second = lines(path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", first.pop("timestamp"))
    assert first == {"event": "trained", "level": "info", "process": "silo-00", "task": 3, "seconds": 1.5}
    assert (second["event"], second["level"]) == ("no answer", "warning")


@pytest.mark.parametrize("format_", LogFormat)
def test_control_characters_of_a_peer_are_escaped_and_long_texts_cut(tmp_path: Path, format_: LogFormat) -> None:
    path = tmp_path / "log"
    log = open_log(LogOptions(LogLevel.INFO, path, format_, console=False), "coordinator")
    log.info("error\x1b[2J reported\nlevel=error", error="a\x1b]0;title\x07b\u202e\n" + "x" * 5000)
    (line,) = path.read_text().splitlines()
    assert not re.search(r"[\x00-\x1f\x7f\u202e]", line)
    assert "x1b" in line
    assert len(line) < 1000


def test_a_log_on_a_full_or_missing_disk_never_stops_a_run_but_is_refused_at_the_start(tmp_path: Path) -> None:
    options = LogOptions(LogLevel.INFO, tmp_path / "file" / "log", console=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        options.check()
    open_log(options, "silo-00").info("not written")
    assert open_log(None, "silo-00") is QUIET


def test_records_of_a_message_log_are_logged_with_the_level_of_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logger = open_log(LogOptions(LogLevel.DEBUG, path, LogFormat.JSON, console=False), "coordinator")
    with MessageLog(tmp_path / "coordinator.jsonl", "coordinator", WallClock(), logger=logger) as log:
        log.note(LogEvent.STARTED, run="tiny")
        log.note(LogEvent.PEER_LOST, peer="silo-01")
        log.note(LogEvent.ERROR_REPORTED, peer="silo-01", error="no memory")
        log.refused("unknown", "bad_signature", "not signed", 10)
    found = [(line["level"], line["event"], line.get("peer")) for line in lines(path)]
    assert found == [
        ("info", "started", None),
        ("warning", "peer_lost", "silo-01"),
        ("error", "error_reported", "silo-01"),
        ("warning", "message refused", "unknown"),
    ]


def test_the_most_detailed_log_of_a_silo_has_no_secret(tiny: Path, tmp_path: Path) -> None:
    scenario, path = resolved(tiny, "rounds=2", "training.warmup_rounds=1"), tmp_path / "silo.log"
    logs = LogOptions(LogLevel.DEBUG, path, LogFormat.JSON, console=False)

    def logging(uri: str, keys: Path) -> None:
        run_silo(SiloArguments(run_of(scenario), "silo-00", uri, keys, tmp_path, logs=logs))

    run(scenario, tmp_path, silos=scenario.silo_names[1:], others=[logging])
    text = path.read_text()
    events = {line["event"] for line in lines(path)}
    assert {"started", "connecting", "joined", "trained", "task received", "reply sent"} <= events
    for key in (tmp_path / "keys").glob("*.key"):
        secrets = re.findall(r"[A-Za-z0-9+/=]{24,}", key.read_text())
        assert secrets, "the private key's file has its key as text"
        assert not [secret for secret in secrets if secret in text]
