"""Compression in whole runs: with messages and without, resumed, with faults, in every mode; what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from coordinator import run_context
from coordinator.round_events import PendingTask, Phase
from coordinator.updates import validated
from fedmq.audit.log_checks import audit_run
from fedmq.audit.report import payload_lines
from fedmq.errors import InputError, RemoteWireError
from fedmq.federation import updates
from fedmq.federation.population import build_population
from fedmq.launch.estimates import estimate
from fedmq.runs.report import run_report
from fedmq.runs.report.logs import LogFacts
from fedmq.storage.run_folder import RunFolder, load_aligned
from fedmq.wire.compression import Settings, encoded, form_of
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.messages import EVALUATOR, Header, Kind, Message, TaskInfo
from fedmq.wire.payloads import Delta, ModalityPrototypes, Model
from silos.tasks import Silo, SiloArguments
from tests import in_process_run, threaded_run
from tests.threaded_run import resolved, run_of

BOTH = "compression={updates: {kind: int8}, model: {kind: bfloat16}}"
CRASH = "faults=[{kind: coordinator_crash, after_round: 2}, {kind: coordinator_crash, after_event: 7}]"
MODES = (
    ("bfloat16", "sync"),
    ("int8", "sync"),
    ("int8", "async"),
    ("top_k", "buffered"),
    ("low_rank", "sync"),
    ("low_rank", "async"),
)


def updates_as(kind: str) -> str:
    return f"compression.updates={{kind: {kind}, rank: 1}}"


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_a_run_that_was_killed_and_resumed_gives_the_same_model(
    tiny: Path, tmp_path: Path, kind: str, mode: str
) -> None:
    settings = (updates_as(kind), f"aggregation.mode={mode}")
    whole = in_process_run.run(resolved(tiny, *settings), tmp_path / "whole")
    killed = in_process_run.run_restarted(resolved(tiny, *settings, CRASH), tmp_path / "killed")
    assert whole.summary is not None
    assert killed.summary is not None
    assert whole.phase is killed.phase is Phase.DONE
    assert killed.summary.model_digest == whole.summary.model_digest
    plain = in_process_run.run(resolved(tiny, f"aggregation.mode={mode}"), tmp_path / "plain").summary
    assert plain is not None
    assert plain.model_digest != whole.summary.model_digest


def test_a_silo_keeps_what_is_left_with_its_personal_state_and_the_method_does_not_see_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = list[str](), Silo.local

    def watched(silo: Silo, state: object) -> object:
        local = real(silo, state)  # type: ignore[arg-type]
        seen.extend(local.state)
        return local

    monkeypatch.setattr(Silo, "local", watched)
    in_process_run.run(resolved(tiny, updates_as("low_rank"), "protocol={name: fedper}", "participation=1"), tmp_path)
    assert seen
    assert not [name for name in seen if name.startswith("compression")]
    for silo in ("silo-00", "silo-01", "silo-02", "silo-03"):
        kept = load_aligned(sorted(RunFolder(tmp_path).silo_state(silo).glob("task-*.safetensors"))[-1])
        own = {name for name in kept if name.startswith("compression.partial_delta.")}
        assert own == {"compression.partial_delta.residual", "compression.partial_delta.factors"}
        assert kept.keys() - own
        assert kept["compression.partial_delta.residual"].any()


def test_logs_summary_report_and_audit_have_both_sizes(tiny: Path, tmp_path: Path) -> None:
    scenario = resolved(tiny, BOTH, "participation=1", "rounds=2")
    (tmp_path / "scenario.yaml").write_text(scenario.dump())
    sealed = threaded_run.run(scenario, tmp_path)
    inline = in_process_run.run(scenario, tmp_path / "inline")
    assert sealed.summary is not None
    assert inline.summary is not None
    assert sealed.summary.model_digest == inline.summary.model_digest
    told = sealed.summary.bytes
    assert told == inline.summary.bytes
    assert told.decoded_down["model"] == 2 * told.down["model"]
    for kind in ("delta", "partial_delta"):
        assert 3.5 < told.decoded_up[kind] / told.up[kind] <= 4

    silo = {each: path for path in (tmp_path / "messages").glob("*.jsonl") for each in [path.stem]}
    seen = 0
    for name, path in silo.items():
        for _, record in read_log(path):
            if not isinstance(record, MessageRecord) or record.header.kind not in (Kind.TASK, Kind.REPLY):
                continue
            for kind, size, decoded in record.both_sizes:
                factor = decoded / size if kind in ("model", "delta", "partial_delta") and size else None
                assert factor is None or 2 <= factor <= 4, (name, kind)
                seen += factor is not None
    assert seen > 20
    to_evaluator = [
        record
        for _, record in read_log(silo["coordinator"])
        if isinstance(record, MessageRecord) and record.header.receiver == EVALUATOR and record.payloads
    ]
    assert to_evaluator
    assert all(record.decoded is None for record in to_evaluator)

    audit = audit_run(tmp_path)
    assert audit.findings == []
    assert any("delta" in line and "decoded)" in line for line in payload_lines(audit, "silo-00"))
    left = run_report.answers(sealed.summary, [], scenario, LogFacts())[2]
    assert all("decoded)" in line for line in left[2][:2])
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary["bytes"]["decoded_up"]["delta"] += 4
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert any("delta, decoded" in finding.what for finding in audit_run(tmp_path).findings)


def test_without_compression_neither_log_nor_summary_mentions_it(finished: Path) -> None:
    assert '"decoded' not in (finished / "summary.json").read_text()
    logs = list((finished / "messages").glob("*.jsonl"))
    assert len(logs) == 6
    assert not [path for path in logs if '"decoded"' in path.read_text()]


def test_the_estimate_and_virtual_time_are_of_the_compressed_sizes(tiny: Path) -> None:
    slow = ("participation=1", "cost={bandwidth: 1000, speed_sigma: 0, jitter_sigma: 0, latency: 0}")
    found = {}
    for name, settings in (("plain", ()), ("small", (BOTH,))):
        scenario = resolved(tiny, *slow, *settings)
        population = build_population(scenario)
        context, _ = run_context.run_context_of(scenario, population.counted(scenario), RunFolder(Path()))
        found[name] = context.cost, estimate(run_of(scenario), population)
    (plain, whole), (small, less) = found["plain"], found["small"]
    assert small.down_bytes == plain.down_bytes / 2
    assert 0.25 <= small.up_bytes / plain.up_bytes < 0.27
    assert less.up < 0.35 * whole.up
    assert less.down < 0.6 * whole.down
    assert small.duration("silo-00", 1, 0) < 0.4 * plain.duration("silo-00", 1, 0)


def test_an_update_or_model_in_another_form_than_agreed_is_refused(tiny: Path, tmp_path: Path) -> None:
    scenario = resolved(tiny, BOTH, "protocol={name: fedavg}")
    population = build_population(scenario)
    context, theta = run_context.run_context_of(scenario, population.counted(scenario), RunFolder(tmp_path))
    silo, layout = context.context.silos[0], context.context.layout
    header = Header(
        run="r", kind=Kind.REPLY, sender=silo.name, receiver="coordinator", sequence=1, sent_at=0.0, reply_to=1
    )
    arguments = SiloArguments(run_of(scenario), silo.name, "", tmp_path, tmp_path)
    worker = Silo(arguments, population, population.build_model(scenario, "cpu", ("image", "text")), noise=0)
    task = replace(header, kind=Kind.TASK, sender="coordinator", receiver=silo.name, reply_to=None)
    state = context.protocol.initial(theta)
    info = TaskInfo(round=0, rounds=4, committed=0, learning_rate=0.001)
    answer = worker.respond(Message(task, context.task(state, silo), info))
    pending = PendingTask(1, 0, 0)
    assert validated(Message(header, answer), context, silo, pending)
    buffer = np.zeros(layout.size, np.float32)
    for form in ("none", "bfloat16", "top_k"):
        values = buffer if form == "none" else encoded(form, buffer, Settings())
        other = [replace(each, buffer=values) if isinstance(each, Delta) else each for each in answer]
        with pytest.raises(RemoteWireError, match=f"a delta with compression {form}, agreed: int8"):
            validated(Message(header, tuple(other)), context, silo, pending)
    with pytest.raises(RemoteWireError, match="a model with compression none, agreed: bfloat16"):
        worker.respond(Message(task, context.protocol.task(state, silo), info))


@pytest.mark.parametrize("rule", ["norm_bound", "median", "trimmed_mean", "krum"])
def test_robust_rules_get_the_decoded_values(tiny: Path, tmp_path: Path, rule: str) -> None:
    robust = f"aggregation.robust={{rule: {rule}, bound: 1.0}}"
    settings = ("missing_modality={}", "participation=1", "rounds=2", "silos.count=5")
    attack = "faults=[{kind: sign_flip, silos: [silo-01]}, {kind: nan, silos: [silo-02], rounds: [0]}]"
    done = in_process_run.run(resolved(tiny, *settings, updates_as("top_k"), robust, attack), tmp_path)
    assert done.phase is Phase.DONE
    assert done.summary is not None
    assert done.summary.messages.refused == 1


HASHING = "objective={base: dcmh, bits: 8, hidden: 16}"


@pytest.mark.parametrize("method", [("moon",), ("mfcpl",), ("fedper",), ("fedhap", HASHING, "missing_modality={}")])
def test_other_methods_run_with_compression(tiny: Path, tmp_path: Path, method: tuple[str, ...]) -> None:
    settings = (f"protocol={method[0]}", *method[1:], "rounds=2", BOTH)
    assert in_process_run.run(resolved(tiny, *settings), tmp_path).phase is Phase.DONE


def test_compression_comes_after_clipping_and_noise(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = list[tuple[float, str]](), updates.compress

    def watched(payloads: object, *arguments: object, **options: object) -> object:
        found, state = real(payloads, *arguments, **options)  # type: ignore[arg-type]
        for before, after in zip(payloads, found, strict=True):  # type: ignore[call-overload]
            if isinstance(before, Delta) and isinstance(after, Delta):
                seen.append((float(np.linalg.norm(before.buffer)), form_of(after.buffer)))
        return found, state

    monkeypatch.setattr(updates, "compress", watched)
    in_process_run.run(resolved(tiny, BOTH, "privacy.clip_norm=0.001", "rounds=2"), tmp_path)
    assert seen
    assert all(norm <= 0.00101 and form == "int8" for norm, form in seen)


@pytest.mark.parametrize("kind", ["top_k", "low_rank"])
def test_forms_that_undo_clipping_are_refused_unless_there_is_noise(tiny: Path, kind: str) -> None:
    with pytest.raises(InputError, match=r"compression\.updates\.kind") as caught:
        resolved(tiny, updates_as(kind), "privacy.clip_norm=1")
    assert "error feedback" in str(caught.value)
    resolved(tiny, updates_as(kind), "privacy={clip_norm: 1, noise_multiplier: 1}")
    resolved(tiny, updates_as("int8"), "privacy.clip_norm=1")


def test_methods_without_updates_or_models_are_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    for setting, place in (
        (updates_as("int8"), "compression.updates.kind"),
        ("compression.model.kind=int8", "compression.model.kind"),
    ):
        with pytest.raises(InputError, match=f"{place}.*silos of local"):
            in_process_run.run(resolved(tiny, "protocol={name: local}", setting), tmp_path / place)


def test_a_model_has_no_sparse_or_low_rank_form(tiny: Path) -> None:
    for kind in ("top_k", "low_rank"):
        with pytest.raises(InputError, match=r"compression\.model\.kind"):
            resolved(tiny, f"compression.model.kind={kind}")
    written = yaml.safe_load(resolved(tiny).dump())
    assert written["compression"] == {
        "updates": {"kind": "none", "fraction": 0.1, "rank": 8},
        "model": {"kind": "none"},
    }


def test_the_evaluator_gets_the_exact_model(tiny: Path, tmp_path: Path) -> None:
    scenario = resolved(tiny, "compression.model.kind=int8")
    context, theta = run_context.run_context_of(
        scenario, build_population(scenario).counted(scenario), RunFolder(tmp_path)
    )
    state = context.protocol.initial(theta)
    (model,) = [each for each in context.task(state, context.context.silos[0]) if isinstance(each, Model)]
    assert form_of(model.buffer) == "int8"
    assert form_of(state.model(context.context.layout).buffer) == "none"
    zeros = np.zeros(3, np.float32)
    others = (ModalityPrototypes(zeros, zeros, 3),)
    assert context.to_silos(others) == others
