"""Every method that runs on sites' own data, and every mode of aggregation, with a silo that joins late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.runs.results import read_summary
from tests.own_data_sites import IMAGE_ONLY
from tests.own_data_threads import OwnRun

pytestmark = pytest.mark.slow
HASHES = {"objective": {"base": "dcmh", "bits": 16}}
SMALL = {"objective": {"base": "dscmr", "enhance": True, "hidden": 32}}
ASYNC, BUFFERED = {"mode": "async"}, {"mode": "buffered", "buffer": 2}
#: Method, its objective, aggregation, and the silo that is late.
RUNS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("fedavg", {}, {}, IMAGE_ONLY),
    ("rcsr", {}, ASYNC, "silo-02"),
    ("rcsr", {}, BUFFERED, IMAGE_ONLY),
    ("fedcafe", HASHES, {}, "silo-02"),
    ("fedcafe", HASHES, ASYNC, IMAGE_ONLY),
    ("fedhap", HASHES, BUFFERED, "silo-02"),
    ("feduch", {}, {}, IMAGE_ONLY),
    ("fedbridge", {}, ASYNC, "silo-02"),
    ("fedbridge", {}, {}, IMAGE_ONLY),
    ("creamfl", {}, BUFFERED, "silo-02"),
    ("fedscmr", SMALL, {}, "silo-02"),
]
IDS = [f"{method} {aggregation.get('mode', 'sync')}, late {late}" for method, _, aggregation, late in RUNS]


@pytest.mark.parametrize(("method", "objective", "aggregation", "late"), RUNS, ids=IDS)
def test_a_late_silo_takes_part(
    method: str, objective: dict[str, Any], aggregation: dict[str, Any], late: str, tmp_path: Path
) -> None:
    more = {"protocol": method, **objective, "aggregation": aggregation, "evaluation": {"every": 3}}
    run = OwnRun(tmp_path, {"rounds": 6, "participation": {"minimum": 2}, **more})
    first = [name for name in run.scenario.silo_names if name != late]
    run.coordinate(listening=lambda: run.start(*first), stop_wanted=run.from_version(1, late))
    assert set(run.ended.values()) == {""}, run.ended
    merged = [late in line.replies for line in run.merges]
    assert len(merged) == 6 and not merged[0] and any(merged)
    summary = read_summary(run.folder)
    assert summary.per_silo[late].participations == sum(merged)
    assert summary.own_heldout is not None and (late in summary.own_heldout.per_silo) == (late != IMAGE_ONLY)
    findings = audit_run(run.folder.root).findings
    assert not findings, findings
