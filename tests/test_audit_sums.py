"""The audit of runs with secure sums: clear updates, unsigned keys, and silos that were told other things."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from fedmq.audit import sums
from fedmq.audit.log_checks import audit_run
from fedmq.audit.policy import check_policy, read_policy
from fedmq.audit.report import Evidence, verdict
from fedmq.audit.sums import SumChecks
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.keys import load_accepted
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import LogRecord, MessageRecord, NoteRecord, read_log
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Payload
from fedmq.wire.secure_sum import IN_CLEAR
from silos.program import ReadySilo
from tests.own_data_threads import OwnRun
from tests.small_federation import ADAPTERS
from tests.test_protocols_sums import ALL
from tests.threaded_run import resolved, run

SETTINGS = (
    "protocol=fedavg",
    "rounds=2",
    "participation=1.0",
    "evaluation.every=0",
    "privacy.secure_aggregation={max_weight: 1.0, min_contributors: 1.0}",
)
Change = Callable[[str, LogRecord], LogRecord]


@pytest.fixture(scope="module")
def summed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with secure sums."""
    folder = tmp_path_factory.mktemp("summed") / "run"
    folder.mkdir()
    scenario = resolved(tiny, *SETTINGS)
    (folder / "scenario.yaml").write_text(scenario.dump())
    run(scenario, folder)
    return folder


def noted(event: LogEvent, **facts: str) -> Change:
    """Silo-01's notes of an event with other facts."""

    def change(process: str, record: LogRecord) -> LogRecord:
        if isinstance(record, NoteRecord) and record.event is event and process == "silo-01":
            return NoteRecord.model_validate({**record.plain(), **facts}, strict=False)
        return record

    return change


def content(kind: str, *, digest: str | None = None, other: str | None = None) -> Change:
    """Silo-01's messages of the second round with a payload of a kind, whose digest or kind is another one."""

    def change(process: str, record: LogRecord) -> LogRecord:
        if not isinstance(record, MessageRecord) or record.header.base_version != 1 or process != "silo-01":
            return record
        kinds = [each for each, _ in record.payloads]
        if kind not in kinds:
            return record
        digests, payloads = list(record.digests), list(record.payloads)
        place = kinds.index(kind)
        digests[place], payloads[place] = digest or digests[place], (other or kind, 7)
        return record.model_copy(update={"digests": digests, "payloads": payloads})

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda _, record: record, None),
        (content("masked_update", other="delta"), "silo-01 sent a delta of version 1, though only masked updates"),
        (content("masked_update", other="class_prototypes"), "silo-01 sent a class_prototypes of version 1"),
        (content("sum_weights", digest="0" * 64), "silo-01 was sent other sum_weights of version 1 than silo-00"),
        (content("sum_keys", digest="0" * 64), "silo-01 was sent keys of version 1 that are not those"),
        (noted(LogEvent.SUM_KEYS, signature="00" * 64), "keys of the secure sum of version 0 that silo-01 did"),
        (noted(LogEvent.SUM_KEYS, keys="00" * 64), "silo-00 was sent keys of version 0 that are not those"),
        (noted(LogEvent.SUM_KEYS, roster="0" * 64), "silo-01 signed keys of version 0 for other silos"),
    ],
)
def test_findings_about_sums(summed: Path, change: Change, found: str | None) -> None:
    folder, checks = RunFolder(summed), SumChecks()
    for path in sorted((summed / "messages").glob("silo-*.jsonl")):
        for number, record in read_log(path):
            assert record is not None
            checks.take(path.stem, f"{path.name}:{number}", change(path.stem, record))
    keys = {name: {key.public_bytes_raw().hex()} for name, key in load_accepted(summed / "keys").items()}
    whats = [finding.what for finding in checks.findings(yaml.safe_load(folder.scenario.read_text()), keys)]
    assert (not whats) if found is None else any(found in what for what in whats)


def test_the_audit_says_that_only_masked_updates_left(summed: Path, tmp_path: Path) -> None:
    line = "- updates left the silos masked only, and each silo signed its keys of each secure sum"
    assert line in verdict(audit_run(summed), Evidence()).holds.splitlines()
    shutil.copytree(summed / "messages", tmp_path / "messages")
    assert line not in verdict(audit_run(tmp_path), Evidence()).holds, "without a scenario this is not checked"


def test_two_masked_updates_of_a_round_are_found(summed: Path) -> None:
    checks, plain = SumChecks(), yaml.safe_load((summed / "scenario.yaml").read_text())
    for number, record in read_log(RunFolder(summed).messages("silo-01")):
        assert record is not None
        for each in (record, content("masked_update", digest="0" * 64)("silo-01", record)):
            checks.take("silo-01", str(number), each)
    assert "silo-01 sent 2 masked updates of version 1" in "; ".join(each.what for each in checks.findings(plain, {}))


def test_a_run_without_sums_or_scenario_has_no_such_findings(summed: Path) -> None:
    checks = SumChecks()
    for number, record in read_log(RunFolder(summed).messages("silo-01")):
        assert record is not None
        checks.take("silo-01", str(number), content("masked_update", other="delta")("silo-01", record))
    for scenario in (None, {"privacy": {"secure_aggregation": None}}, {}):
        assert not list(checks.findings(scenario, {}))


RCSR_P = "protocol={name: rcsr, personal: router, personal_onset: 1, warmup: 1}"
FILE = Path("docs/policies/secure_sums.yaml")


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the program of one silo: it replies with its update."""
    respond = ReadySilo.respond

    def clear(ready: ReadySilo, message: Message) -> tuple[Payload, ...]:
        if ready.silo.facts.name == "silo-00" and message.header.kind is Kind.TASK:
            return ready.silo.respond(message)
        return respond(ready, message)

    monkeypatch.setattr(ReadySilo, "respond", clear)


def check_stopped(folder: RunFolder) -> None:
    log = folder.messages("silo-00").read_text()
    assert '"withheld":"delta"' in log and '["delta"' not in log


@pytest.mark.parametrize("method", ["protocol=fedavg", RCSR_P])
def test_a_clear_update_is_stopped_at_the_silo(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A silo of a run with sums needs no policy for that."""
    plant(monkeypatch)
    run(resolved(tiny, *SETTINGS, method, "rounds=1"), tmp_path)
    check_stopped(RunFolder(tmp_path))
    assert not audit_run(tmp_path).findings


@pytest.mark.parametrize(("method", "planted"), [("fedavg", False), ("rcsr", False), ("rcsr", True)])
def test_sites_with_their_own_data_keep_the_policy_for_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, planted: bool
) -> None:
    anyone = {"secure_aggregation": {"max_weight": 1.0, "min_contributors": 1.0}}
    sites = OwnRun(tmp_path, {"protocol": method, "privacy": anyone, "rounds": 2})
    sites.policies = dict.fromkeys(sites.scenario.silo_names, FILE)
    if planted:
        plant(monkeypatch)
    sites.coordinate(listening=lambda: sites.start(*sites.scenario.silo_names))
    assert set(sites.ended.values()) == {""}
    merged = [name for name in sites.scenario.silo_names if name != "silo-00" or not planted]
    assert [line.replies for line in sites.merges] == [merged] * 2
    check_clean(sites.folder)
    if planted:
        check_stopped(sites.folder)


def check_clean(folder: RunFolder) -> None:
    """Check that a run keeps the policy, and that its silos' updates leave masked only."""
    audit = audit_run(folder.root)
    assert not audit.findings and not check_policy(audit, read_policy(FILE), FILE).findings
    kinds = {kind for _, record in audit.messages if record.header.kind is Kind.REPLY for kind, _ in record.payloads}
    assert "masked_update" in kinds and not kinds & IN_CLEAR


#: Settings of methods beside their options.
OF: Mapping[str, tuple[str, ...]] = {
    "fedhap": ("objective={base: triplet, bits: 16, hidden: 16}",),
    "fedcafe": (
        "protocol={name: fedcafe, memory: class_mean, weighted_agg: false}",
        "objective={base: dcmh, bits: 16, hidden: 16}",
    ),
    "fedscmr": ("objective={base: dscmr, bits: 16, hidden: 16, enhance: true}",),
    "fedcmr": ("objective={base: dscmr, bits: 16, hidden: 16, leaky: true}",),
    **{name: (f"backbone.adapter={kind}",) for name, kind in ADAPTERS.items()},
}
LABELLED = ("fedhap", "fedcafe", "fedscmr")


@pytest.mark.parametrize(
    "name", [*LABELLED, *(pytest.param(name, marks=pytest.mark.slow) for name in ALL if name not in LABELLED)]
)
def test_each_method_s_run_keeps_the_policy_for_sums(tiny: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "scenario.yaml").write_text(
        (scenario := resolved(tiny, *SETTINGS, "rounds=1", f"protocol={name}", *OF.get(name, ()))).dump()
    )
    run(scenario, tmp_path)
    check_clean(RunFolder(tmp_path))


def test_no_masked_update_of_a_personal_router_has_room_for_an_adapter(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text((scenario := resolved(tiny, *SETTINGS, RCSR_P, "rounds=3")).dump())
    run(scenario, tmp_path)
    check_clean(RunFolder(tmp_path))
    sizes = {kind: set[int]() for kind in ("model", "masked_update")}
    for _, record in audit_run(tmp_path).messages:
        for kind, size in record.payloads:
            sizes.get(kind, set[int]()).add(size)
    assert max(sizes["masked_update"]) == max(sizes["model"]) > 0


def test_silos_without_part_are_not_in_the_roster() -> None:
    assert sums._silos({"silos": {"count": 3, "without": ["silo-01"]}}) == ["silo-00", "silo-02"]
    assert not list(sums._silos({"silos": 7}))
