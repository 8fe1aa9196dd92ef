"""Tables at 80 columns, with names of 24 characters and paths of 120: nothing is cut off, and no line is longer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from fedmq.audit.log_checks import Audit
from fedmq.cli import audit as audit_command
from fedmq.cli import operate, search
from fedmq.cli.console import out
from fedmq.cli.data import show_data
from fedmq.launch.data_check import DataFacts, SiloData
from fedmq.retrieval.search import Hit
from fedmq.runs.status import SiloPhase, SiloStatus, StatusFile

NAMES = [f"hospital-of-saint-mary-{number}" for number in range(3)]
PATH = "/srv/" + "photographs-of-the-year/" * 4 + "a-red-fox-in-snow.png"
REASON = f"training failed: CUDA out of memory, see {PATH}"
STATUS = StatusFile(
    run="own-0123456789ab", written="2026-11-26T17:00:00+00:00", phase="collecting", round=1, rounds=200, loss=0.5,
    metrics={"mean_r1": 0.5}, metrics_round=1, up=1, down=2, now=1.0, elapsed=1.0, refused={}, last_refused="",
    silos={
        name: SiloStatus(
            phase=SiloPhase.GIVEN_UP, heard="2026-11-26T17:00:00+00:00", task_seconds=123.0, limit=600.0,
            error=REASON, up=123_456_789_012, down=987_654_321,
        )
        for name in NAMES
    },
)  # fmt: skip


def status() -> None:
    operate._show(STATUS, datetime(2026, 11, 26, 18, tzinfo=UTC))


def hits() -> None:
    out.print(search.hits_table([Hit(1, 0.5, PATH, "a red fox in the snow " * 5)], binary=False))


def audited() -> None:
    audit = Audit()
    for name in NAMES:
        audit.records[name], audit.frames[name] = 1_234_567, 123_456_789_012
        audit.sent[name], audit.left[name] = (
            Counter(modality_prototypes=1_234_567),
            Counter(modality_prototypes=123_456_789_012),
        )
    out.print(audit_command._table(audit))


def checked() -> None:
    labels = {f"smileys-and-emotion-{number}": 12_345 for number in range(8)}
    silos = {name: SiloData(("image", "text"), 123_456, labels, 12_345, 100, 200) for name in NAMES}
    show_data(DataFacts("folder", 9, 9, {}, labels, 0, silos=silos, missing=(PATH,)))


@pytest.mark.parametrize("show", [status, hits, audited, checked])
def test_long_names_and_paths_are_whole_in_a_table_of_80_columns(
    show: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show()
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line[:1] in tuple("┏┃┡│└├")]
    assert rows
    assert max(map(len, rows)) <= 80
    assert "…" not in text
    assert ("123.5 GB" in text) == (show in (status, audited)), "one way to write bytes"
    first = "".join(re.split("[│┃]", line)[1 if show is not hits else 3].strip() for line in rows if "│" in line)
    for name in [PATH] if show is hits else NAMES:
        assert name in first
    if show is status:
        assert f"{NAMES[0]}, last error: {REASON}" in text.splitlines()
