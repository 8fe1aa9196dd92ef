"""Forgeries of a finished run by someone who knows the format of its logs: each is found, with exit code 3.

Without keys a forger can recompute every hash chain. With the keys of some processes it can also sign their logs anew.
Only the keys of all processes make a forgery that cannot be found, which the last sentence of the audit then says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.round_events import Phase
from fedmq.audit.findings import Cause
from fedmq.audit.log_checks import audit_run
from fedmq.config.run_id import digest_of, name_of
from fedmq.config.yaml_files import read_yaml
from fedmq.runs.results import result_digests
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.codec import digest
from fedmq.wire.key_requests import new_request
from fedmq.wire.keys import accept_key, load_accepted, load_identity
from fedmq.wire.log_records import signed_statement
from fedmq.wire.payloads import Metrics
from tests import threaded_run
from tests.adversary_forged_logs import edit, edit_metrics, forge, lines, rebuild, reseal, rewrite
from tests.command_line import audited, refused
from tests.threaded_run import resolved

pytestmark = pytest.mark.slow

Record = dict[str, Any]
SETTINGS = ("rounds=2", "participation=1.0", "evaluation.every=1")
ENDS = ("coordinator", "silo-00")
AUDITING = Path(__file__).parents[1] / "docs" / "explanation" / "auditing.md"


@pytest.fixture(scope="module")
def honest(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the private keys of all processes beside it."""
    out = tmp_path_factory.mktemp("forged") / "run"
    assert threaded_run.run(resolved(tiny, *SETTINGS), out).phase is Phase.DONE
    return out


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "run"))


def processes(run: Path) -> list[str]:
    return sorted(path.stem for path in (run / "messages").glob("*.jsonl"))


def keys_of(run: Path, *names: str) -> dict[str, Ed25519PrivateKey]:
    return {name: load_identity(run / "keys", name).key for name in names}


def anchored(run: Path, process: str, peer: str) -> int:
    """Number of a process's last record of which a peer received the hash; -1 if there is none.

    A heartbeat at the end of a run may have been received by nobody.
    """
    received = {record.get("head") for record in map(json.loads, lines(run, peer)) if record["action"] == "received"}
    return max((n for n, line in enumerate(lines(run, process)) if json.loads(line)["hash"] in received), default=-1)


def each(run: Path, names: Iterable[str], change: Callable[[Record], Record | None]) -> None:
    for name in names:
        forge(run, name, change)


def keep(record: Record) -> Record:
    return record


def is_reply(record: Record) -> bool:
    """Whether a record is of the first reply of silo-00, at either end."""
    return (record.get("kind"), record.get("sender"), record.get("base_version")) == ("reply", "silo-00", 0)


def replies(change: Callable[[Record], Record] = keep, **changes: Any) -> Callable[[Path], None]:
    """Change the first reply of silo-00 in the logs of both of its ends."""
    return lambda run: each(run, ENDS, lambda record: change(record) | changes if is_reply(record) else record)


def other_content(record: Record) -> Record:
    """A message with payloads of other contents."""
    return record | {"digests": [f"{number:064x}" for number in range(len(record["digests"]))]}


def smaller(record: Record) -> Record:
    """A message whose first payload with tensors has 4 bytes."""
    place = next(n for n, (_, size) in enumerate(record["payloads"]) if size)
    return record | {
        "payloads": [[kind, 4 if n == place else size] for n, (kind, size) in enumerate(record["payloads"])]
    }


def renamed_update(record: Record) -> Record:
    """A message whose delta is said to be a model."""
    return record | {"payloads": [["model" if kind == "delta" else kind, size] for kind, size in record["payloads"]]}


def later(wall: str, seconds: float) -> str:
    moved = datetime.fromisoformat(wall) + timedelta(seconds=seconds)
    return moved.isoformat(timespec="milliseconds")


def shift(run: Path, names: Iterable[str], seconds: float = 3600.0) -> None:
    each(run, names, lambda record: record | {"wall": later(record["wall"], seconds)})


def invented_message(run: Path) -> None:
    """A further reply of silo-00, with the next counter of its session, at both ends."""
    content = [json.loads(line) for line in lines(run, "silo-00")]
    sent = [record for record in content if record["action"] == "sent" and "counter" in record]
    invented = next(record for record in sent if is_reply(record)) | {"counter": sent[-1]["counter"] + 1}
    here = invented | {"wall": content[-1]["wall"]}
    rewrite(run, "silo-00", reseal(map(json.dumps, [*content, here])))
    content = [json.loads(line) for line in lines(run, "coordinator")]
    theirs = invented | {"action": "received", "process": "coordinator", "wall": content[-1]["wall"]}
    rewrite(run, "coordinator", reseal(json.dumps(record) for record in [*content, theirs]))


def claimed_noise(run: Path) -> None:
    """The scenario gets noise after the run, the run its new name, the declarations of all starts the new facts."""
    path = run / "scenario.yaml"
    plain = dict(read_yaml(path))
    before = name_of(plain)
    plain["privacy"] = {**plain["privacy"], "clip_norm": 1.0, "noise_multiplier": 4.0}
    path.write_text(yaml.safe_dump(plain))
    facts = {"run": name_of(plain), "scenario": digest_of(plain), "privacy": plain["privacy"]}

    def renamed(record: Record) -> Record:
        return record | {name: value for name, value in facts.items() if name in record}

    each(run, processes(run), renamed)
    assert name_of(plain) != before


def exchanged_silos(run: Path) -> None:
    """Every mention of silo-00 becomes one of silo-01 in all files, and the other way round."""
    for path in [*(run / "messages").glob("*.jsonl"), run / "metrics.jsonl", run / "summary.json"]:
        text = path.read_text().replace("silo-00", "silo-xx").replace("silo-01", "silo-00")
        path.write_text(text.replace("silo-xx", "silo-01"))
    one, other = (run / "messages" / f"silo-0{number}.jsonl" for number in (0, 1))
    one.rename(run / "kept")
    other.rename(one)
    (run / "kept").rename(other)
    for name in processes(run):
        rewrite(run, name, reseal(lines(run, name)))


def other_figures(run: Path) -> None:
    """Better figures in metrics, summary and the digests of the evaluator's last answer at both ends."""
    content = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(content) if line["kind"] == "evaluation")
    before = digest(Metrics(last["metrics"], last["per_silo"]))
    last["metrics"]["mean_r1"] = 1.0
    after = digest(Metrics(last["metrics"], last["per_silo"]))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    edit(run / "summary.json", lambda summary: summary["metrics"].update(mean_r1=1.0))
    swap = {before: after}
    each(
        run,
        ("coordinator", "evaluator"),
        lambda record: (
            record | {"digests": [swap.get(one, one) for one in record["digests"]]} if "digests" in record else record
        ),
    )


def without(*actions: str) -> Callable[[Record], Record | None]:
    """Remove records of these actions; heads and causes go, too, as the numbers of the other records change."""
    lost = ("head", "caused_by")
    return lambda record: None if record["action"] in actions else {k: v for k, v in record.items() if k not in lost}


def middle_signature(run: Path) -> None:
    content = lines(run, "coordinator")
    place = next(n for n, line in enumerate(content) if '"at":"merge"' in line)
    rewrite(run, "coordinator", reseal(content[:place] + content[place + 1 :]))


def borrowed_signatures(run: Path) -> None:
    """The reply of silo-00 is changed; its later signatures are replaced by those of silo-01."""
    theirs = [json.loads(line)["signature"] for line in lines(run, "silo-01") if '"signed"' in line]
    replies(other_content)(run)
    count = iter(theirs)
    forge(
        run,
        "silo-00",
        lambda record: record | {"signature": next(count, theirs[-1])} if record["action"] == "signed" else record,
    )


def removed_notes(run: Path) -> None:
    each(run, ["coordinator"], lambda record: None if record["action"] == "timeline" else record)


def removed_heartbeats(run: Path) -> None:
    """The last message of a session leaves no gap when it is removed: the stop at both ends."""
    last = ("stop", "silo-00")
    each(run, ENDS, lambda record: None if (record.get("kind"), record.get("receiver")) == last else record)


def cut_silo(run: Path) -> None:
    content = lines(run, "silo-00")
    place = max(n for n, line in enumerate(content) if '"kind":"reply"' in line)
    rewrite(run, "silo-00", content[:place])


def other_heads(run: Path) -> None:
    """Both ends say that the reply carried the head of the task before."""
    head = next(json.loads(line)["head"] for line in lines(run, "silo-00") if '"head"' in line)
    replies(head=head)(run)


def stripped_log(run: Path) -> None:
    forge(run, "silo-00", lambda record: None if record["action"] in ("start", "signed") else record)


def other_losses(run: Path) -> None:
    """Other losses in the metrics, with the digest of that file in the coordinator's note of the results."""
    edit_metrics(run, "merge", lambda line: line.update(loss=0.5))
    digests = result_digests(RunFolder(run))
    forge(run, "coordinator", lambda record: record | (digests if "metrics.jsonl" in record else {}))


def message_after_the_end(run: Path) -> None:
    """A further message of silo-00, after the last one of every process, at both ends and in the summary."""
    theirs = [json.loads(line) for line in lines(run, "silo-00")]
    last = next(record for record in reversed(theirs) if record["action"] == "sent" and "counter" in record)
    for name, more in (("silo-00", {}), ("coordinator", {"action": "received", "process": "coordinator"})):
        content = [json.loads(line) for line in lines(run, name)]
        end = [record["action"] for record in content].index("signed", len(content) - 1)
        added = last | more | {"counter": last["counter"] + 1, "wall": content[end]["wall"]}
        rewrite(run, name, reseal(map(json.dumps, [*content[:end], added, *content[end:]])))


def strange_key(run: Path) -> None:
    """The log of silo-00 is changed and signed with a key that the forger made."""
    replies(other_content)(run)
    rebuild(run, {"silo-00": Ed25519PrivateKey.generate()})


def late_key(run: Path) -> None:
    """From the middle on, silo-00 is said to have started again with another key, made by the forger."""
    content = [json.loads(line) for line in lines(run, "silo-00")]
    start = next(record for record in content if record["action"] == "start")
    key = Ed25519PrivateKey.generate()
    place = next(n for n, record in enumerate(content) if is_reply(record))
    again = start | {"key": key.public_key().public_bytes_raw().hex(), "wall": content[place]["wall"]}
    rewrite(run, "silo-00", reseal(json.dumps(one) for one in [*content[:place], again, *content[place:]]))
    # Only the tail is signed again: rebuild() would replace the first key, too.
    replaced = [json.loads(line) for line in lines(run, "silo-00")]
    done: list[Record] = []
    for record in replaced:
        if record["action"] == "signed" and record["n"] > place:
            previous = json.loads(reseal(map(json.dumps, done))[-1])["hash"]
            statement = signed_statement(start["run"], record | {"previous": previous})
            record["signature"] = key.sign(statement).hex()
        done.append(record)
    rewrite(run, "silo-00", reseal(map(json.dumps, done)))


def copied_log(run: Path) -> None:
    """The log of silo-01 takes the place of that of silo-00, with the names changed."""
    rewrite(run, "silo-00", reseal(line.replace("silo-01", "silo-00") for line in lines(run, "silo-01")))


def notes(**changes: Any) -> Callable[[Path], None]:
    """Change the first event in the coordinator's log."""

    def change(run: Path) -> None:
        first = next(json.loads(line)["n"] for line in lines(run, "coordinator") if '"event"' in line)
        forge(run, "coordinator", lambda record: record | changes if record["n"] == first else record)

    return change


EMPTIED = replies(payloads=[], digests=[])
FORGERIES: dict[str, Callable[[Path], None]] = {
    # Not found before logs were signed.
    "a merged reply emptied on both sides": EMPTIED,
    "a message invented on both sides": invented_message,
    "the times of one log shifted": lambda run: shift(run, ["silo-01"]),
    "the times of all logs shifted": lambda run: shift(run, processes(run)),
    "times running backwards": lambda run: each(
        run, ["silo-00"], lambda record: record | {"wall": later(record["wall"], -60.0 * record["n"])}
    ),
    "noise claimed after the fact": claimed_noise,
    "two silos exchanged": exchanged_silos,
    "traffic in the summary": lambda run: edit(run / "summary.json", lambda each: each["bytes"]["up"].update(delta=1)),
    "messages in the summary": lambda run: edit(run / "summary.json", lambda each: each["messages"].update(sent=1)),
    # Twenty and more others, without keys.
    "a payload's size on both sides": replies(smaller),
    "a payload's content on both sides": replies(other_content),
    "a payload's kind on both sides": replies(renamed_update),
    "the size of the frames on both sides": replies(bytes=1000),
    "the tag on both sides": replies(tag="ab" * 16),
    "the time of sending on both sides": replies(sent_at=99.5),
    "the task's number on both sides": replies(sequence=77, reply_to=77),
    "the base version on both sides": replies(base_version=1),
    "the head of a message on both sides": other_heads,
    "no head on both sides": lambda run: each(
        run, ENDS, lambda record: {k: v for k, v in record.items() if k != "head"} if is_reply(record) else record
    ),
    "the last message of a session removed on both sides": removed_heartbeats,
    "events removed": removed_notes,
    "an event changed": notes(now=1.25),
    "figures changed everywhere": other_figures,
    "privacy in the declarations": lambda run: each(
        run, processes(run), lambda record: record | {"privacy": {"clip_norm": 1.0}} if "privacy" in record else record
    ),
    "data in the declarations": lambda run: each(
        run, processes(run), lambda record: record | {"data": "ab" * 32} if record["action"] == "start" else record
    ),
    "the keys in a declaration": lambda run: forge(
        run, "silo-00", lambda record: record | {"peers": {}} if record["action"] == "start" else record
    ),
    "one log without its signatures": stripped_log,
    "a signature removed in the middle": middle_signature,
    "signatures of another process": borrowed_signatures,
    "a log signed with a new key": strange_key,
    "a new key from the middle on": late_key,
    "a log in place of another": copied_log,
    "a log cut before its last reply": cut_silo,
    "the end of the coordinator's log unsigned": lambda run: rewrite(
        run, "coordinator", lines(run, "coordinator")[:-1]
    ),
}
#: Forgeries with the keys of some processes, which they sign again.
WITH_KEYS: dict[str, tuple[tuple[str, ...], Callable[[Path], None]]] = {
    "its own log": (("silo-00",), replies(other_content)),
    "its own notes": (("coordinator",), notes(now=1.25)),
    "its own times": (("coordinator",), lambda run: shift(run, ["coordinator"])),
    "a reply emptied by both ends": (ENDS, EMPTIED),
    "losses changed by the coordinator": (("coordinator",), other_losses),
    "a message invented by both ends after the end": (ENDS, message_after_the_end),
    "a message invented by both ends": (ENDS, invented_message),
    "figures changed by coordinator and evaluator": (("coordinator", "evaluator"), other_figures),
    "noise claimed by all but one": (("coordinator", "evaluator", "silo-00", "silo-01", "silo-02"), claimed_noise),
}
#: Where the heads that messages carry cannot be made to agree, or their disagreement is the forgery.
INCONSISTENT = {"a log in place of another", "a log cut before its last reply", "the head of a message on both sides"}


def test_an_honest_run_has_no_findings(run: Path) -> None:
    assert [(finding.place, finding.what) for finding in audit_run(run).findings] == []


def test_signing_unchanged_logs_again_changes_nothing(run: Path) -> None:
    before = {name: lines(run, name) for name in processes(run)}
    rebuild(run, keys_of(run, *processes(run)))
    assert {name: lines(run, name) for name in processes(run)} == before


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_without_keys_is_found_even_if_all_heads_agree(run: Path, forgery: str) -> None:
    FORGERIES[forgery](run)
    assert audit_run(run).findings
    if forgery not in INCONSISTENT:
        rebuild(run, dict.fromkeys(processes(run)))
        assert audit_run(run).findings


@pytest.mark.parametrize("forgery", WITH_KEYS)
def test_a_forgery_with_the_keys_of_some_processes_is_found_whether_they_rewrite_the_other_logs_or_not(
    run: Path, forgery: str
) -> None:
    names, change = WITH_KEYS[forgery]
    change(run)
    for others in (names, processes(run)):
        rebuild(run, {**dict.fromkeys(others), **keys_of(run, *names)})
        assert audit_run(run).findings


def _signed(content: list[Record]) -> list[int]:
    return [n for n, record in enumerate(content) if record["action"] == "signed"]


def _signed_with(kept: list[Record], content: list[Record], key: Ed25519PrivateKey) -> list[Record]:
    """The records, and after them a start with a key and its signed end."""
    start = next(record for record in content if record["action"] == "start")
    again = start | {"key": key.public_key().public_bytes_raw().hex(), "wall": content[-1]["wall"]}
    first = content[_signed(content)[0]] | {"wall": content[-1]["wall"]}
    done = [json.loads(line) for line in reseal(map(json.dumps, [*kept, again, first, first | {"at": "end"}]))]
    for n in (-2, -1):
        done[n]["previous"] = json.loads(reseal(map(json.dumps, done[:n]))[-1])["hash"]
        done[n]["signature"] = key.sign(signed_statement(start["run"], done[n])).hex()
    return done


def test_a_forgery_with_all_keys_is_not_found_and_the_audit_says_that_it_proves_nothing_against_it(run: Path) -> None:
    shift(run, processes(run))
    rebuild(run, keys_of(run, *processes(run)))
    code, found = audited(run, "--keys", str(run / "keys"))
    assert (code, found["findings"]) == (0, [])
    first = "- that the holders of all keys did not collude to write false logs"
    assert found["not_proven"].splitlines()[:2] == ["Not proven:", first]


def test_heads_noted_before_find_a_forgery_with_all_keys(run: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads.json"
    code, found = audited(run, "--heads", str(heads))
    assert code == 0
    for expected in (str(heads), found["heads_digest"]):
        code, again = audited(run, "--expect", expected)
        assert code == 0 and "nothing was changed since the heads were noted" in again["holds"]
    shift(run, processes(run))
    rebuild(run, keys_of(run, *processes(run)))
    for expected in (str(heads), found["heads_digest"]):
        code, again = audited(run, "--expect", expected)
        assert code == 3 and again["findings"]


def test_keys_made_by_a_forger_are_found_with_the_keys_of_the_sites(run: Path) -> None:
    shift(run, processes(run))
    rebuild(run, {name: Ed25519PrivateKey.generate() for name in processes(run)})
    code, found = audited(run)
    assert code == 0 and "whose keys these are" in found["not_proven"]
    code, found = audited(run, "--keys", str(run / "keys"))
    assert code == 3 and any("another key than that of silo-00" in each["what"] for each in found["findings"])


def test_a_key_replaced_later_and_the_key_made_in_the_folder_are_those_of_the_sites(run: Path, tmp_path: Path) -> None:
    keys, own = run / "keys", tmp_path / "keys"
    _, request = new_request(own, "coordinator")
    assert request.name == "coordinator"
    for name in processes(run):
        accept_key(own, name, load_accepted(keys)[name])
    code, found = audited(run, "--keys", str(own))
    assert code == 0 and "no one else" not in found["not_proven"]
    accept_key(own, "silo-00", Ed25519PrivateKey.generate().public_key())
    (own / "accepted" / "coordinator.pub").unlink()
    code, found = audited(run, "--keys", str(own))
    assert [each["place"] for each in found["findings"]] == ["coordinator.jsonl:2"]  # it made another key there
    accept_key(own, "coordinator", load_accepted(keys)["coordinator"])
    code, found = audited(run, "--keys", str(own))
    assert code == 0 and "no one else held the keys of silo-00 that were replaced or removed" in found["not_proven"]


def test_logs_of_which_none_is_signed_are_found(run: Path) -> None:
    shift(run, processes(run))
    each(run, processes(run), without("start", "signed"))
    unsigned = {one.place for one in audit_run(run).findings if one.cause is Cause.SIGNATURE}
    assert unsigned == {f"{name}.jsonl" for name in processes(run)}


def test_a_run_truncated_at_an_earlier_signature_is_found_by_heads_noted_later(run: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads.json"
    assert audited(run, "--heads", str(heads))[0] == 0
    (run / "summary.json").unlink()
    shutil.rmtree(run / "model")
    for name in processes(run):
        content = lines(run, name)
        rewrite(run, name, content[: next(n for n, line in enumerate(content) if '"signed"' in line) + 1])
    (run / "metrics.jsonl").unlink()
    (run / "agreement.json").unlink()
    code, found = audited(run)
    assert code == 0 and "that the run did not continue" in found["not_proven"]
    assert audited(run, "--expect", str(heads))[0] == 3


def test_records_that_fewer_keys_could_change_are_listed_as_not_proven(run: Path) -> None:
    _, found = audited(run)
    ends, content = found["not_anchored"], lines(run, "coordinator")
    assert ends.keys() == set(processes(run)) and "last records of its log" in found["not_proven"]
    assert "the keys of all 6 processes, except for the last records" in found["holds"]
    peers = [name for name in processes(run) if name != "coordinator"]
    assert ends["coordinator"] == len(content) - 1 - min(anchored(run, "coordinator", peer) for peer in peers)


#: Changes at the end of a log that take no key; docs/explanation/auditing.md names each.
AT_THE_END: dict[str, Callable[[list[Record], Ed25519PrivateKey], list[Record]]] = {
    "records cut off": lambda content, _: content[:-1],
    "the last record changed": lambda content, _: [
        *content[:-1],
        content[-1] | {"wall": later(content[-1]["wall"], 9)},
    ],
    "an earlier signature called the end": lambda content, _: [
        *content[: _signed(content)[-2]],
        content[_signed(content)[-2]] | {"at": "end"},
    ],
    "records appended": lambda content, _: [
        *content,
        next(r for r in reversed(content) if "counter" in r) | {"bytes": 10**9, "wall": content[-1]["wall"]},
    ],
    "an end signed with another key": lambda content, key: _signed_with(content[:-1], content, key),
    "a start with another key appended": lambda content, key: _signed_with(content, content, key),
}


@pytest.mark.parametrize("change", AT_THE_END)
@pytest.mark.parametrize("process", ["coordinator", "silo-01"])
def test_without_a_key_nobody_changes_the_end_of_a_log(run: Path, process: str, change: str) -> None:
    before, content = audit_run(run), [json.loads(line) for line in lines(run, process)]
    rewrite(run, process, reseal(map(json.dumps, AT_THE_END[change](content, Ed25519PrivateKey.generate()))))
    after = audit_run(run)
    assert {Cause.SIGNATURE, Cause.KEY} & {finding.cause for finding in after.findings}
    assert all(after.frames[name] <= before.frames[name] for name in processes(run))  # what was added does not count
    assert change in " ".join(AUDITING.read_text().split())


#: The table of docs/explanation/auditing.md: what a forger can change, the keys that it has, and a log that it changes.
FORGERS = {
    "someone without a key": ("nothing; of a killed process, the records after its last signature", (), "silo-01"),
    "a silo": ("the end of its log, from the time of its last message on", ("silo-01",), "silo-01"),
    "a silo with the coordinator": ("the end of both logs, likewise", ("silo-01", "coordinator"), "coordinator"),
    "all processes": (
        "everything",
        ("coordinator", "evaluator", "silo-00", "silo-01", "silo-02", "silo-03"),
        "silo-01",
    ),
}


def test_the_table_of_forgers_says_what_the_audit_does_not_find(run: Path, tmp_path: Path) -> None:
    table = AUDITING.read_text().partition("| forger |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split(" | ")[:2] for line in table] == [[f"| {name}", row[0]] for name, row in FORGERS.items()]
    for name, (_, keys, process) in FORGERS.items():
        content = [json.loads(line) for line in lines(run, process)]
        others = [each for each in processes(run) if each not in keys]
        seen = max((anchored(run, process, other) for other in others), default=-1)
        free = seen + 1 if keys else len(content)  # its first record that can be changed
        for first in {free - 1, free} & {*range(len(content))}:
            forged = Path(shutil.copytree(run, tmp_path / f"{name}-{first}"))
            each(forged, [process], lambda r, n=first: r | {"wall": later(r["wall"], float(r["n"] >= n))})  # type: ignore[misc]
            rebuild(forged, keys_of(forged, *keys))
            assert (audited(forged)[0] == 3) is (first < free), (name, first)


def test_records_after_the_last_signature_are_said_to_be_not_proven(run: Path) -> None:
    """silo-00 was killed before it was told to stop and could sign the end of its log."""
    stop = ("stop", "silo-00")
    each(run, ENDS, lambda record: None if (record.get("kind"), record.get("receiver")) == stop else record)
    killed = lines(run, "silo-00")[:-1]
    rewrite(run, "silo-00", killed)
    rebuild(run, keys_of(run, *processes(run)))
    code, found = audited(run)
    unsigned = len(killed) - 1 - _signed([json.loads(line) for line in killed])[-1]  # its reply, perhaps heartbeats
    assert code == 0 and f"the last {unsigned} record" in found["not_proven"]


def test_keys_made_at_the_sites_prove_who_signed_and_a_missing_one_is_no_difference(run: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    new_request(keys, "coordinator", b"a passphrase")
    assert audited(run, "--keys", str(keys))[0] == 3  # of another coordinator, whose passphrase is not asked for
    shutil.copy(run / "keys" / "coordinator.key", keys)
    shutil.copytree(run / "keys" / "accepted", keys / "accepted")
    (keys / "accepted" / "coordinator.pub").unlink()  # as `keys new` leaves it: a process does not accept itself
    code, found = audited(run, "--keys", str(keys))
    assert (code, found["findings"], found["without_key"]) == (0, [], [])
    assert "whose keys" not in found["not_proven"] and "who signed" not in found["not_proven"]
    (keys / "coordinator.key").unlink()
    code, found = audited(run, "--keys", str(keys))
    assert (code, found["findings"], found["without_key"]) == (0, [], ["coordinator"])
    assert f"`fedmq keys accept {keys} {keys}/coordinator.request` adds it" in found["not_proven"]
    shutil.rmtree(keys / "accepted")
    (keys / "accepted").mkdir(0o755)
    assert "no keys" in refused("audit", run, "--keys", keys)


def test_the_heads_of_a_changed_log_are_not_those_that_were_noted(run: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads.json"
    before = audited(run, "--heads", str(heads))[1]
    path = run / "messages" / "silo-00.jsonl"
    kept = path.read_text().splitlines()
    changed = [line.replace('"bytes":', '"bytes":1', 1) if number == len(kept) - 2 else line
               for number, line in enumerate(kept)]  # fmt: skip
    assert changed != kept
    path.write_text("\n".join(changed) + "\n")
    after = audited(run)[1]
    assert after["heads_digest"] != before["heads_digest"]
    assert {name for name, head in after["heads"].items() if head != before["heads"][name]} == {"silo-00"}
    for expected in (before["heads_digest"], before["heads"]["silo-00"]["head"], str(heads)):
        found = audited(run, "--expect", expected)[1]["findings"]
        assert any(each not in after["findings"] for each in found), expected
    for sentence, text in (("fails", "contradict each other"), ("holds", "coordinator"), ("not_proven", "differ")):
        assert text in after[sentence]
