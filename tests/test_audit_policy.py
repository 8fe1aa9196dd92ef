"""Audit policies: what may pass between silos and coordinator, and how the messages of a run are checked."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fedmq.audit import policy
from fedmq.audit.log_checks import Audit
from fedmq.clock import WallClock
from fedmq.config.scenario import Backbone
from fedmq.encoders.base import InputSpec
from fedmq.errors import InputError
from fedmq.models.build import build
from fedmq.wire.message_log import MessageLog
from fedmq.wire.payloads import PAYLOADS
from tests.adversary_forged_logs import lines, message_record, reseal, rewrite
from tests.command_line import audited, printed, refused
from tests.two_logs import held, log_of, message, two_logs, written

GUIDE = Path(__file__).parent.parent / "docs" / "howto" / "audit.md"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with the logs of one silo and of the coordinator."""
    return two_logs(tmp_path)


# ------------------------------------------------------------------------------------------------------- the policy
SHIPPED = Path(__file__).parent.parent / "docs" / "policies" / "rcsr_p.yaml"


def test_a_compliant_run_reports_how_many_messages_were_checked(run: Path) -> None:
    found = held(run, "up: {kinds: [delta], bytes_per_payload: {delta: 20}, bytes_per_message: 100, bytes_in_all: 300}")
    assert not held(run, "up: {bytes_per_message: 50, bytes_per_message_with: {delta: 100, loss: 10}}").findings
    assert (found.checked, found.free, found.findings) == (3, 0, [])  # each once, though both ends logged it
    console = Console(record=True, width=200)
    policy.show(found, console)
    assert f"3 messages checked against {run / 'policy.yaml'}: no breach" in console.export_text()


def test_each_message_that_breaks_a_rule_is_a_finding(run: Path) -> None:
    for text, breach in (
        ("up: {kinds: [loss, geometry]}", "reply with delta, 20 bytes: up.kinds allows loss, geometry"),
        ("up: {kinds: []}", "reply with delta, 20 bytes: up.kinds allows nothing"),
        ("up: {bytes_per_message: 99}", "reply, 100 bytes: up.bytes_per_message allows 99"),
        ("up: {bytes_per_payload: {delta: 19}}", "reply with delta, 20 bytes: up.bytes_per_payload.delta allows 19"),
        (
            "up: {bytes_per_message: 50, bytes_per_message_with: {delta: 99}}",
            "reply, 100 bytes: up.bytes_per_message_with.delta allows 99",
        ),
        (
            "up: {bytes_per_message: 50, bytes_per_message_with: {metrics: 500}}",
            "reply, 100 bytes: up.bytes_per_message allows 50",
        ),
        ("peers: [coordinator]", "reply, 100 bytes: peers allows coordinator"),
    ):
        findings = held(run, text).findings
        assert [f.place for f in findings] == [f"silo-00.jsonl:{number}" for number in (3, 4, 5)]
        assert {f.what for f in findings} == {f"silo-00 up, {breach}"}


def test_the_total_bytes_of_a_silo_are_one_finding_at_the_message_that_exceeds_the_limit(run: Path) -> None:
    (finding,) = held(run, "up: {bytes_in_all: 150}").findings
    assert finding.place == "silo-00.jsonl:4"
    assert finding.what == ("silo-00 up, reply, 200 bytes: up.bytes_in_all allows 150, which this message exceeds")


def test_downloads_and_the_evaluator_have_separate_rules(run: Path) -> None:
    with MessageLog(run / "messages" / "evaluator.jsonl", "evaluator", WallClock()) as log:
        log.message("sent", message(1, sender="evaluator"), "e" * 32, 100)
    with log_of(run, "coordinator") as log:
        log.message("received", message(1, sender="evaluator"), "e" * 32, 100)
        log.message("sent", message(0, "coordinator", "silo-00"), "d" * 32, 100)
    found = held(run, "down: {kinds: [model]}")
    assert [f.what for f in found.findings] == ["silo-00 down, reply with delta, 20 bytes: down.kinds allows model"]
    assert (found.checked, found.free) == (1, 4)
    found = held(run, "evaluator: {up: {kinds: [metrics]}}")
    assert [f.place for f in found.findings] == ["evaluator.jsonl:1"]
    assert "evaluator.up.kinds allows metrics" in found.findings[0].what
    assert held(run, "up: {kinds: [delta]}").checked == 3  # up and down apply to silos only


def test_the_rule_of_one_silo_overrides_the_general_rule_key_by_key(run: Path) -> None:
    general = "up: {kinds: [loss], bytes_per_message: 100}"
    assert not held(run, f"{general}\nsilos: {{silo-00: {{up: {{kinds: [delta]}}}}}}").findings
    assert not held(run, f"{general}\nsilos: {{silo-00: {{up: {{kinds: null}}}}}}").findings
    found = held(run, f"{general}\nsilos: {{silo-00: {{up: {{kinds: [delta], bytes_per_message: 50}}}}}}").findings
    assert {f.what for f in found} == {"silo-00 up, reply, 100 bytes: silos.silo-00.up.bytes_per_message allows 50"}
    narrower = "up: {kinds: [delta]}\nsilos: {silo-00: {up: {kinds: [partial_delta]}}}"
    assert all("silos.silo-00.up.kinds allows partial_delta" in f.what for f in held(run, narrower).findings)
    assert len(held(run, narrower).findings) == 3


def test_a_rule_for_an_unknown_silo_is_a_finding(run: Path) -> None:
    (finding,) = held(run, "up: {kinds: [delta]}\nsilos: {silo-0: {up: {kinds: []}}}").findings
    assert finding.place.endswith("policy.yaml: silos.silo-0")
    assert "no log mentions" in finding.what


def test_a_policy_that_applies_to_no_message_is_reported_as_not_tested(run: Path) -> None:
    found = held(run, "down: {kinds: [model]}")
    assert (found.checked, found.free) == (0, 3)
    assert ["not tested" in f.what for f in found.findings] == [True]


def test_a_message_is_checked_as_each_end_logged_it(run: Path) -> None:
    content = lines(run, "silo-00")
    content[3] = content[3].replace('["delta",20]', '["loss",0]')
    rewrite(run, "silo-00", reseal(content))
    found = held(run, "up: {kinds: [loss]}").findings
    assert [f.place for f in found] == ["silo-00.jsonl:3", "silo-00.jsonl:5", "coordinator.jsonl:4"]
    assert not held(run, "up: {kinds: [loss, delta]}").findings


def test_a_silo_without_a_log_here_is_checked_by_the_log_of_the_other_end(run: Path) -> None:
    (run / "messages" / "silo-00.jsonl").unlink()
    found = held(run, "up: {kinds: [loss], bytes_in_all: 250}")
    assert [f.place for f in found.findings if "kinds" in f.what] == [f"coordinator.jsonl:{n}" for n in (3, 4, 5)]
    assert [f.place for f in found.findings if "in_all" in f.what] == ["coordinator.jsonl:5"]


#: Invalid policies, with the place of the error and the value that it names; None names none.
INVALID: list[tuple[str, str, object]] = [
    ("up:\n  kinds: [delta, adapters]", ": line 2: up.kinds.1", "adapters"),
    ("up: {bytes_per_payload: {adapters: 1}}", ": line 1: up.bytes_per_payload.adapters", "adapters"),
    ("up: {kinds: delta}", ": line 1: up.kinds", "delta"),
    ("up: {bytes_per_message: 20 MB}", ": line 1: up.bytes_per_message", "20 MB"),
    ("up: {bytes_in_all: -1}", ": line 1: up.bytes_in_all", -1),
    ("upwards: {}", ": line 1: upwards", "upwards"),
    ("silos: {silo-1: {kinds: []}}", ": line 1: silos.silo-1.kinds", "kinds"),
    ("silos: {Silo 1: {}}", ": line 1: silos.Silo 1", "Silo 1"),
    ("silos: {evaluator: {up: {kinds: []}}}", ": silos", "evaluator"),
    ("silos: {silo-1: {up: {}}}", "", "a policy that limits nothing"),
    ("", "", "NoneType"),
    ("up: [", ": line 1", None),
    ("up: {}\nup: {}", ": line 2", None),
]


def test_an_invalid_policy_is_refused_with_one_line(tmp_path: Path) -> None:
    for text, place, value in INVALID:
        file = written(tmp_path, text)
        with pytest.raises(InputError) as caught:
            policy.read_policy(file)
        assert caught.value.place == f"{file}{place}"
        assert value is None or caught.value.found == value
        assert "\n" not in str(caught.value)


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["silo-00", "silo-01"]),
        st.lists(st.tuples(st.sampled_from(sorted(PAYLOADS.keys() - {"refusal"})), st.integers(0, 99)), max_size=4),
        st.integers(1, 999),
    ),
    min_size=1,
    max_size=8,
)


@given(MESSAGES, st.data())
@settings(max_examples=40)
def test_any_policy_stricter_than_the_tightest_compliant_one_is_broken(
    messages: list[tuple[str, list[tuple[str, int]], int]], data: st.DataObject
) -> None:
    audit = Audit()
    for number, (silo, payloads, size) in enumerate(messages):
        contents = [(kind, size, kind) for kind, size in payloads]
        record = message_record(silo, *contents, counter=number, frames=size)
        audit.messages.append((f"{silo}.jsonl:{number}", record))
    sums = [
        sum(size for silo, payloads, size in messages if silo == name and payloads) for name in ("silo-00", "silo-01")
    ]
    every = [payload for _, payloads, _ in messages for payload in payloads]
    rule = {
        "kinds": sorted({kind for kind, _ in every}),
        "bytes_per_payload": {kind: max(size for each, size in every if each == kind) for kind, _ in every},
        "bytes_per_message": max(size for _, _, size in messages),
        "bytes_in_all": max(sums),
    }

    def breaches(**up: object) -> int:
        return len(policy.check_policy(audit, policy.Policy.model_validate({"up": up}), Path("p")).breaches)

    assert breaches(**rule) == 0
    assert breaches(bytes_per_message=rule["bytes_per_message"] - 1) >= 1
    if every:
        assert breaches(bytes_in_all=rule["bytes_in_all"] - 1) == sums.count(max(sums))
        kind = data.draw(st.sampled_from(rule["kinds"]))
        assert breaches(kinds=[each for each in rule["kinds"] if each != kind]) == sum(
            each == kind for each, _ in every
        )
        most = rule["bytes_per_payload"][kind]
        if most:
            assert breaches(bytes_per_payload={kind: most - 1}) == every.count((kind, most))


def test_the_command_exits_with_5_for_a_broken_policy_and_with_2_for_an_invalid_one(run: Path) -> None:
    code, facts = audited(run, "--policy", written(run, "up: {kinds: [delta]}"))
    assert (code, facts["ok"], facts["findings"]) == (0, True, [])
    assert facts["policy"] == {
        "ok": True,
        "file": str(run / "policy.yaml"),
        "checked": 3,
        "not_held": 0,
        "broken": [],
        "unknown_silos": [],
    }
    code, facts = audited(run, "--policy", written(run, "up: {kinds: [loss]}"))
    assert (code, facts["ok"], len(facts["findings"])) == (5, False, 3)
    assert facts["policy"]["broken"][0] == {
        "place": "silo-00.jsonl:3",
        "process": "silo-00",
        "way": "up",
        "message": "reply",
        "payload": "delta",
        "bytes": 20,
        "rule": "up.kinds allows loss",
        "what": "silo-00 up, reply with delta, 20 bytes: up.kinds allows loss",
    }
    printed("audit", run, "--policy", run / "policy.yaml", code=5)
    assert "up.kinds" in refused("audit", run, "--policy", written(run, "up: {kinds: [x]}"))


def test_the_sizes_of_the_shipped_policy_are_those_of_the_lite_backbone() -> None:
    rule = policy.read_policy(SHIPPED).up.bytes_per_payload
    assert rule is not None
    layout = build(Backbone(name="lite"), InputSpec((512,), (512,)), 0).layout
    assert rule["delta"] == layout.nbytes
    assert 2 * rule["partial_delta"] == layout.nbytes
    # A message that also carried both matrices of an adapter of default width would exceed the limit.
    limit = policy.read_policy(SHIPPED).up.bytes_per_message
    assert limit is not None
    assert limit < rule["delta"] + 2 * 64 * 512 * 4


def test_the_policies_in_the_docs_can_be_read(tmp_path: Path) -> None:
    text = GUIDE.read_text()
    blocks = re.findall(r"((?:^    (?:up|down|evaluator|silos|peers):.*\n(?:^     .*\n)*)+)", text, flags=re.MULTILINE)
    assert blocks
    for block in blocks:
        read = policy.read_policy(written(tmp_path, textwrap.dedent(block)))
        assert yaml.safe_load(textwrap.dedent(block)).keys() == read.model_fields_set
    named = set(re.findall(r"`(\w+)`", text))
    assert {*policy.Rule.model_fields, *policy.Policy.model_fields} <= named


def test_many_breaches_of_a_policy_are_abbreviated(run: Path) -> None:
    with log_of(run, "silo-00") as log:
        for counter in range(4, 41):
            log.message("sent", message(counter), f"{counter:032x}", 100)
    console = Console(record=True, width=200)
    policy.show(held(run, "up: {kinds: [loss]}"), console)
    shown = console.export_text()
    assert "and 20 more; --json has all" in shown
    assert (shown.count("up.kinds allows loss"), shown.count("reply with delta, 20 bytes")) == (1, 20)
