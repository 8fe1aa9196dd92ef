"""What a silo causes in every round is logged for operators once, then counted."""

from __future__ import annotations

import json
from pathlib import Path

from fedmq.clock import WallClock
from fedmq.storage.logs import LogFormat, LogOptions, open_log
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog


def test_a_silo_whose_policy_withholds_every_reply_is_logged_once_then_counted(tmp_path: Path) -> None:
    operators = LogOptions(file=tmp_path / "log", console=False, format=LogFormat.JSON)
    path = tmp_path / "coordinator.jsonl"
    with MessageLog(path, "coordinator", WallClock(), logger=open_log(operators, "coordinator")) as log:
        for number in range(25):
            log.note(LogEvent.TASK_FAILED, silo="silo-01", sequence=number, reason="policy")
        log.note(LogEvent.TASK_FAILED, silo="silo-02", sequence=1, reason="policy")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["silo"], line.get("times")) for line in lines] == [
        ("silo-01", None),
        ("silo-01", 10),
        ("silo-02", None),
    ]
    assert len(path.read_text().splitlines()) == 26, "the message log has all of them"
