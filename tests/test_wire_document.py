"""docs/reference/wire.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import protocols
from coordinator import run_context
from fedmq.wire import channel, codec, fields, handshake, key_agreement, layout, messages, payloads, sessions
from fedmq.wire.fields import Field, FloatMap, Names, Real, Tensor, Text, Whole, Word
from fedmq.wire.messages import CARRIES, WIRE_VERSION, Kind, Reason
from fedmq.wire.payloads import PAYLOADS
from fedmq.wire.transports import base, tickets
from fedmq.wire.transports._connection_admission import PER_KEY
from tests.small_federation import population

DOCUMENT = (Path(__file__).parent.parent / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")


def section(title: str, level: int = 2) -> str:
    """The text under a heading, up to the next of its level or above."""
    found = re.search(rf"^{'#' * level} {re.escape(title)}\n(.*?)(?=^#{{1,{level}}} |\Z)", DOCUMENT, re.M | re.S)
    assert found, f"no section {title}"
    return found.group(1)


def rows(text: str) -> dict[str, list[str]]:
    """The rows of a section's tables, by the word in their first cell."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        word = re.fullmatch(r"\|? ?`([a-z0-9_]+)`", cells[0])
        if line.startswith("|") and word:
            found[word.group(1)] = cells[1:]
    return found


def headings(text: str) -> list[str]:
    return re.findall(r"^### (.+)$", text, re.M)


def test_the_documented_wire_version_is_the_codes() -> None:
    assert f"**Wire version: {WIRE_VERSION}.**" in DOCUMENT


def test_exactly_the_existing_payload_kinds_are_documented() -> None:
    assert headings(section("Payloads")) == list(PAYLOADS)


def describe(spec: Field) -> str:
    """The expected description of a field, derived from its declaration."""
    match spec:
        case Tensor():
            bulk = "bulk " if spec.bulk else ""
            empty = f", {spec.shape[0]} from 0" if spec.least == 0 else ""
            return f"{bulk}tensor {' or '.join(spec.dtypes)} ({', '.join(map(str, spec.shape))}){empty}"
        case Whole():
            return f"integer, {spec.low} to {power(spec.high)}"
        case Real():
            bounds = "" if spec.high == float("inf") else f" in [{spec.low:g}, {spec.high:g}]"
            return f"number{bounds}"
        case Word():
            named = {fields.DIGEST: "digest", fields.NAME: "name", payloads.ENCODER: "digest or `none`"}
            return named.get(spec.pattern) or words(spec.pattern)
        case Text():
            return f"str, at most {spec.longest} bytes"
        case Names():
            named = {fields.LAYER: "layer names", fields.NAME: "names", fields.LABEL: "label names"}
            return f"array of {spec.least} to {spec.most} {named[spec.pattern]}"
        case FloatMap():
            return f"map of at most {spec.most} {'names to such maps' if spec.inner else 'metric names to numbers'}"


def words(pattern: re.Pattern[str]) -> str:
    """The words that a pattern lists, as documented."""
    *others, last = (f"`{word}`" for word in pattern.pattern.split("|"))
    return f"{', '.join(others)} or {last}" if len(others) < 6 else _WITHHELD


def power(high: int) -> str:
    return f"2^{(high + 1).bit_length() - 1} - 1" if high > 1000 else str(high)


_WITHHELD = "a payload kind above, `reply`, `heartbeat`, `statement` or `silo_result`"


def test_the_fields_of_payloads_are_documented_in_order_with_their_types() -> None:
    for kind, payload in PAYLOADS.items():
        described = {name: cells[0] for name, cells in rows(section(kind, 3)).items()}
        assert list(described.items()) == [(name, describe(spec)) for name, spec in payload.FIELDS.items()], kind


def test_the_payloads_of_each_method_are_documented() -> None:
    text = " ".join(section("Payloads by method").partition("Further rules")[0].split())
    described = re.findall(r"- `(\w+)`\. Task: (.+?)\. Reply: (.+?)\.(?: Pairs: (.+?)\.)?(?= -|$)", text)
    assert [name for name, *_ in described] == list(protocols.names())
    for name, task, every, pairs in described:
        run = population(name)
        for silo in run.eligible:
            kinds = set(re.findall("`(.+?)`", every + pairs if silo.paired else every))
            assert {payload.KIND for payload in run.protocol.uploads(silo)} == kinds, (name, silo)
        sent = {payload.KIND for silo in run.eligible for payload in run.protocol.task(run.state, silo)}
        assert sent == set(re.findall("`(.+?)`", task)), name


def test_every_message_kind_is_documented_with_what_it_carries() -> None:
    described = rows(section("Messages"))
    assert list(described) == [kind.value for kind in Kind]
    words = {
        "any of training": frozenset(PAYLOADS)
        - {"error", "refusal", "data_statement", "data_format", "silo_modalities", "silo_metrics", "run_status"}
        - {"sum_keys", "sum_weights", "survivors"},
        "sum_keys, sealed_shares, sum_weights, survivors": frozenset(
            {"sum_keys", "sealed_shares", "sum_weights", "survivors"}
        ),
        "data_statement, data_format": frozenset({"data_statement", "data_format"}),
        "data_format, silo_modalities": frozenset({"data_format", "silo_modalities"}),
        "silo_metrics or error": frozenset({"silo_metrics", "error"}),
        "run_status": frozenset({"run_status"}),
        "metrics or none": frozenset({"metrics"}),
        "exactly one error or refusal": frozenset({"error", "refusal"}),
    }
    for kind in Kind:
        expected = described[kind.value][2]
        assert CARRIES[kind] == words.get(expected, frozenset())
        if expected not in words:
            assert expected.startswith("none")


def test_exactly_the_existing_reasons_are_documented() -> None:
    assert list(rows(section("Refusals"))) == [reason.value for reason in Reason]


def test_every_reason_used_in_the_code_is_in_the_enumeration() -> None:
    given = set()
    for module in (codec, sessions, key_agreement, fields, handshake, layout, messages, payloads, base):
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        given |= {name.lower() for name in re.findall(r"Reason\.([A-Z_]+)", text)}
        given |= set(re.findall(r'RemoteWireError\(\s*"([a-z_]+)"', text))
        given |= set(re.findall(r'FieldError\([^\n]*, "([a-z_]+)"\)', text))
    assert given <= {reason.value for reason in Reason}


def test_the_header_keys_are_documented() -> None:
    assert tuple(rows(section("The clear header").partition("\n### ")[0])) == codec._HEADER_KEYS
    short = section("short header", 3)
    assert all(f"`{key}`" in short for key in codec._SHORT_KEYS)
    assert f"at most {codec.MAX_HEADER}" in short and f"{sessions.LEAST_PADDED} bytes" in short
    body = section("The body")
    assert tuple(rows(body.partition("\n### ")[0])) == codec._BODY_KEYS
    assert tuple(rows(section("task info", 3))) == codec._TASK_KEYS


def test_the_handshakes_fields_and_lengths_are_documented() -> None:
    for title, lengths in (("hello", handshake.HELLO_FIELDS), ("welcome", handshake.WELCOME_FIELDS)):
        described = rows(section(title, 3))
        assert set(described) == set(lengths)
        for name, length in lengths.items():
            assert described[name][0] == f"bin, {length} bytes"


def test_every_label_of_the_handshake_is_documented() -> None:
    text = section("The handshake")
    modules = (handshake, key_agreement)
    labels = {value for each in modules for name, value in vars(each).items() if name.endswith("_LABEL")}
    assert len(labels) == 9
    assert {match.encode() for match in re.findall(r'"(fedmq 1 [a-z ]+)"', text)} == labels


def test_name_patterns_and_limits_are_documented() -> None:
    for pattern in (fields.NAME, fields.LAYER, fields.METRIC):
        assert f"`{pattern.pattern}`" in section("Conventions")
    assert f"at most {codec.MAX_HEADER} bytes" in section("Transport")
    assert f"at most {codec.MAX_BODY_HEADER >> 20} MiB" in section("The body")
    assert codec.MAX_BODY == 1 << 30
    least = f"the largest of {run_context.LEAST_BODY >> 20} MiB, four times the model's parameters"
    text = " ".join(section("Transport").split())
    assert f"The limit of silos and the evaluator is 1 GiB. The limit of the coordinator is {least}" in text
    beat, lost, patience = channel.BEAT_SECONDS, channel.LOST_BEATS, channel._COORDINATOR_BEATS
    text = " ".join(section("Messages").split())
    assert f"sent every {beat:.0f} s by silos" in text
    assert f"silent for {lost * beat:.0f} s counts as lost" in text
    assert f"silent for {patience * beat:.0f} s its peers disconnect" in text
    assert base.MAX_FRAME == codec.MAX_BODY + sessions.TAG_BYTES
    assert f"at most {messages.MAX_PAYLOADS} `[kind, fields]`" in section("The body")
    assert f"multiple of {codec.ALIGNMENT}" in section("The body")
    assert f"1 to {layout.MAX_ENTRIES} entries" in section("layout", 3)
    assert f"`{layout.DTYPE}`" in section("layout", 3)
    assert f"at most {handshake.MAX_HANDSHAKE_BODY} bytes" in section("welcome", 3)
    assert sessions.MAX_MESSAGES == 1 << 32
    limits = {name: f"2^{limit.bit_length() - 1}" for name, limit in fields.DIMENSIONS.items()}
    expected = f"n is at most {limits['n']}, N {limits['N']}, C {limits['C']}, d and r {limits['d']}"
    assert expected in " ".join(section("Payloads").split())
    assert limits["d"] == limits["r"]


def test_tickets_are_as_described() -> None:
    text = " ".join(section("tickets", 3).split())
    public = Ed25519PrivateKey.generate().public_key()
    ticket = tickets.ConnectionKeys(Ed25519PrivateKey.generate(), public, "silo-00").ticket(0.0)
    assert f"in base64 ({len(ticket)} characters)" in text
    assert f'"{tickets.LABEL.decode()}" || fields || name' in text
    assert f"at most {tickets.VALID_SECONDS / 3600:.0f} hours" in text
    assert tickets.USES == 4 and f"admits four connections, within {tickets.USE_SECONDS:.0f} s" in text
    assert f"remembers {tickets.REMEMBERED} tickets" in text
    assert PER_KEY == 8 and "eight connections of a key" in text
    assert "500" in text and tickets.FOREIGN == b"500" and tickets.REFUSED == b"400"
