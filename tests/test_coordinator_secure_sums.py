"""Runs with secure aggregation give the plain run's model within fixed-point error, despite dropouts and restarts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.audit.replay import first_difference, read_record
from fedmq.errors import InputError
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import MergeLine
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.secure_sum import IN_CLEAR
from tests import in_process_run
from tests.test_audit_sums import OF
from tests.threaded_run import resolved, run

SUMS = ("protocol=fedavg", "participation=1.0", "evaluation.every=0", "privacy.secure_aggregation=true")
#: The third round has too few silos left for its sum.
DROPS = (
    "faults=[{kind: drop, step: mask, silos: [silo-01], rounds: [1]},"
    " {kind: drop, step: share, silos: [silo-00], rounds: [2]},"
    " {kind: drop, step: mask, silos: [silo-02], rounds: [2]},"
    " {kind: drop, step: reveal, silos: [silo-03], rounds: [3]}]"
)


def merges(folder: Path) -> list[MergeLine]:
    return [line for line in read_metrics(RunFolder(folder)) if isinstance(line, MergeLine)]


def audited(folder: Path) -> list[str]:
    """What the audit of a run finds."""
    return [finding.what for finding in audit_run(folder).findings]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "method",
    [
        ("protocol=fedavg",),
        ("protocol={name: rcsr, warmup: 1}",),
        pytest.param(("protocol={name: rcsr, warmup: 1, router_at: silos}",), marks=SLOW),
        *(pytest.param((f"protocol={name}", *OF[name]), marks=SLOW) for name in ("fedcafe", "fedhap", "fedscmr")),
    ],
)
def test_runs_of_sums_are_the_plain_run_but_for_fixed_point_and_equal_each_other(
    tiny: Path, tmp_path: Path, method: Sequence[str]
) -> None:
    settings = (*SUMS, *method, "evaluation.every=3", "rounds=3")
    all_branches = "privacy.secure_aggregation={max_weight: 1.0, min_contributors: 1.0}"  # RCSR's router may choose one
    first, second = (
        run(resolved(tiny, *settings, all_branches), tmp_path / name).summary for name in ("sums", "again")
    )
    whole = in_process_run.run(resolved(tiny, *settings, "privacy.secure_aggregation=null"), tmp_path / "plain").summary
    assert first is not None and second is not None and whole is not None
    assert first.model_digest == second.model_digest != whole.model_digest
    assert first.metrics == pytest.approx(whole.metrics, rel=0, abs=1e-6) and first.metrics["mean_r1"] > 0
    for mine, plain in zip(merges(tmp_path / "sums"), merges(tmp_path / "plain"), strict=True):
        assert mine.losses == pytest.approx(plain.losses, rel=1e-5)
    assert not audited(tmp_path / "sums")
    kinds = set[str]()
    for name in ("silo-00", "silo-02"):
        for _, record in read_log(RunFolder(tmp_path / "sums").messages(name)):
            if isinstance(record, MessageRecord) and record.action == "sent":
                kinds |= {kind for kind, _ in record.payloads}
    assert "masked_update" in kinds and not kinds & IN_CLEAR


def test_silos_drop_out_between_the_steps_and_a_run_that_is_resumed_is_the_same_run(tiny: Path, tmp_path: Path) -> None:
    """With noise, whose shares a silo draws again, and a clipping norm that moves."""
    noisy = "clip_norm: 0.25, noise_multiplier: 0.5, adaptive_clip: {noise_multiplier: 2.0}"
    scenario = resolved(tiny, *SUMS, DROPS, f"privacy={{secure_aggregation: true, {noisy}}}")
    run(scenario, tmp_path / "once")
    lines = merges(tmp_path / "once")
    assert [line.replies for line in lines] == [
        ["silo-00", "silo-01", "silo-02", "silo-03"],
        ["silo-00", "silo-02", "silo-03"],
        [],
        ["silo-00", "silo-01", "silo-02", "silo-03"],
    ]
    log = RunFolder(tmp_path / "twice").messages("coordinator")

    def masking() -> bool:
        """A masked update of the second round has arrived."""
        return log.exists() and '"masked_update"' in log.read_text() and '"base_version":1' in log.read_text()

    run(scenario, tmp_path / "twice", stop_wanted=masking)
    assert not (tmp_path / "twice" / "summary.json").exists()
    run(scenario, tmp_path / "twice", resume=True)
    once, twice = (read_record(RunFolder(tmp_path / name)) for name in ("once", "twice"))
    assert first_difference(once, twice) is None
    assert once.resumed < twice.resumed and all(len(contents) == 1 for contents in once.messages.values())
    assert len({line.model_extra["clip_norm"] for line in lines if line.replies}) == 3


@pytest.mark.parametrize(
    ("setting", "place", "allowed"),
    [
        (
            "aggregation.mode=async",
            "--set privacy.secure_aggregation: found 'keys that do not fit together'",
            "aggregation.mode sync, not async: only a whole round has a sum",
        ),
        ("aggregation.robust.rule=krum", "aggregation.robust.rule none, not krum", "a rule compares single updates"),
        ("compression.updates.kind=int8", "compression.updates.kind none, not int8", "cannot be compressed"),
        ("launcher=inline", "launcher local or none, not inline", "their own keys"),
        (
            "privacy={secure_aggregation: true, clip_norm: 1.0, noise_multiplier: 1000}",
            "privacy.noise_multiplier 0, or 0.01 to 256, not 1000",
            "steps of the fixed point",
        ),
        ("privacy.secure_aggregation=null", "step mask", "needs privacy.secure_aggregation"),
        ("protocol=fedproto", "--set privacy.secure_aggregation: found 'with fedproto: its merge", "secure_sums.md"),
        (
            "protocol.branch_renorm=conflict_free",
            "with fedavg: branch_renorm conflict_free",
            "null",
        ),
    ],
)
def test_what_has_no_secure_sum_is_refused_by_name_before_the_data_are_read(
    tiny: Path, setting: str, place: str, allowed: str
) -> None:
    with pytest.raises(InputError) as refused:
        resolved(tiny, *SUMS, DROPS, setting)
    assert place in str(refused.value) and allowed in str(refused.value)
