"""Whole runs in one process, with real keys and sealed messages, over memory:// or a TCP link that is cut."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from benchmarks.attacks import free_port
from coordinator.evaluation import UNDER_WAY, EvaluationRequests
from coordinator.round_events import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.errors import RunError
from fedmq.evaluation.program import Evaluator
from fedmq.federation.protocol import State
from fedmq.models.two_tower import BRANCHES
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import MergeLine
from fedmq.runs.status import read_status
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from fedmq.wire.payloads import Metrics, Payload
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests import in_process_run
from tests.threaded_run import resolved, run, run_of
from tests.threaded_run import run as threaded_run
from tests.waiting import PATIENCE, wait_for


@pytest.fixture(scope="module")
def reference(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("reference")
    outcome = run(resolved(tiny), out)
    assert outcome.phase is Phase.DONE
    return out, outcome.summary.plain()


def test_the_summary_has_all_its_fields(reference: tuple[Path, dict[str, object]]) -> None:
    out, _ = reference
    summary = json.loads((out / "summary.json").read_text())
    run_facts = {"protocol", "scenario", "seed", "rounds", "versions", "model_digest", "data_digest", "versions_of"}
    figures = {"metrics", "per_silo", "per_silo_mean", "fairness", "change", "evaluated"}
    assert set(summary) == {*run_facts, *figures, "bytes", "messages", "tasks", "seconds", "processes"}
    assert {"i2t_r1", "t2i_r1", "mean_r1", "i2t_r5", "mean_r10"} <= set(summary["metrics"])
    assert set(summary["per_silo"]) == {"silo-00", "silo-01", "silo-02", "silo-03"}
    assert summary["per_silo"]["silo-02"]["modalities"] == ["image"]
    assert set(summary["fairness"]) == {"std_r1", "worst_r1", "gap_r1"}
    # Each downloaded model is answered by an update without the branch of the modality that the silo lacks.
    (released,) = (out / "model").glob("*.safetensors")
    sizes = {name: array.nbytes for name, array in load_file(released).items()}
    branch = {modality: sum(size for name, size in sizes.items() if name.startswith(prefix))
              for modality, prefix in BRANCHES.items()}  # fmt: skip
    tasks = {name: silo["participations"] for name, silo in summary["per_silo"].items()}
    assert summary["bytes"]["down"]["model"] == sum(tasks.values()) * sum(branch.values())
    assert summary["bytes"]["up"]["delta"] == (tasks["silo-00"] + tasks["silo-01"]) * sum(branch.values())
    lone = tasks["silo-02"] * branch["image"] + tasks["silo-03"] * branch["text"]
    assert summary["bytes"]["up"]["partial_delta"] == lone > 0
    assert summary["tasks"] == {"merged": sum(tasks.values()), "failed": 0, "discarded": 0}
    assert set(summary["seconds"]) == {"total", "startup", "training", "merge", "evaluation", "virtual"}
    assert sum(own["participations"] for own in summary["per_silo"].values()) == 4 * 3
    assert summary["seconds"]["virtual"] > 0
    assert (out / "report.html").stat().st_size > 10_000
    assert (out / "model" / "model.safetensors").exists()


def test_the_logs_agree_and_record_what_left_each_silo(reference: tuple[Path, dict[str, object]]) -> None:
    audit = audit_run(reference[0])
    assert not audit.findings
    for silo in ("silo-00", "silo-02", "silo-03"):
        update = "delta" if silo == "silo-00" else "partial_delta"
        assert set(audit.payloads.bytes[silo]) <= {update, "modality_prototypes", "geometry", "loss", "data_statement"}
    of_images, of_texts = (audit.payloads.bytes[f"silo-{each}"] for each in ("02", "03"))
    assert of_images["partial_delta"] > 0
    assert of_texts["partial_delta"] > 0


def test_the_longest_tasks_of_a_round_are_sent_first(tiny: Path, tmp_path: Path) -> None:
    lone = "missing_modality={silos: {silo-00: image, silo-01: text}}"
    summary = run(resolved(tiny, "rounds=2", lone), tmp_path).summary.plain()
    work = {name: silo["samples"] * len(silo["modalities"]) for name, silo in summary["per_silo"].items()}
    records = [json.loads(line) for line in RunFolder(tmp_path).messages("coordinator").read_text().splitlines()]
    tasks = [record for record in records if record.get("kind") == "task" and record["action"] == "sent"]
    for version in range(2):
        asked = [task["receiver"] for task in tasks if task["base_version"] == version]
        assert asked == sorted(sorted(asked), key=work.__getitem__, reverse=True)
        assert asked != sorted(asked)


@pytest.mark.slow
def test_a_silo_reports_that_its_state_is_missing(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scenario = resolved(tiny, "protocol=fedper")
    kept, gone, older = LogEvent.STATE_KEPT, LogEvent.STATE_MISSING, LogEvent.STATE_OUTDATED

    def count(silo: str, kind: LogEvent) -> int:
        return len(in_process_run.notes(tmp_path, kind, silo))

    assert run(scenario, tmp_path, stop_wanted=stop_after(3, tmp_path)).phase is Phase.STOPPED
    assert count("silo-00", kept) == 1
    shutil.rmtree(RunFolder(tmp_path).silo_state("silo-00"))
    states = {name: sorted(RunFolder(tmp_path).silo_state(name).glob("task-*")) for name in scenario.silo_names}
    last = next(name for name, files in states.items() if len(files) > 1)
    states[last][-1].unlink()
    assert run(scenario, tmp_path, resume=True).phase is Phase.DONE
    assert {name: (count(name, gone), count(name, older)) for name in states} == {
        name: (int(name == "silo-00"), int(name == last)) for name in states
    }
    printed = capfd.readouterr().err
    assert f"silo-00: {gone.meaning}" in printed
    assert f"{last}: the personal state of task " in printed
    assert not audit_run(tmp_path).findings


def test_a_silo_whose_first_tasks_failed_misses_no_state(tiny: Path, tmp_path: Path) -> None:
    away = "faults=[{kind: leave, silos: [silo-00], rounds: [0, 1, 2]}]"
    run(resolved(tiny, "protocol=fedper", "participation=1.0", "rounds=5", away), tmp_path)
    assert in_process_run.notes(tmp_path, LogEvent.STATE_KEPT, "silo-00")
    assert not in_process_run.notes(tmp_path, LogEvent.STATE_MISSING, "silo-00")


def stop_after(merges: int, folder: Path) -> Callable[[], bool]:
    """A stop condition that holds once ``merges`` merges are in the metrics file."""
    path = RunFolder(folder).metrics

    def wanted() -> bool:
        return path.exists() and path.read_text().count('"merge"') >= merges

    return wanted


class SlowEvaluator:
    """An evaluator that waits until ``enough`` evaluations are requested and counts the requests shortly after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: set[int] = set()
        self.enough, self.requests_seen = threading.Event(), 0
        ask, answer = EvaluationRequests.evaluate, Evaluator.evaluate

        def asking(measuring: EvaluationRequests, version: int, state: State) -> None:
            ask(measuring, version, state)
            self.asked.add(version)  # version 0 is requested twice if the evaluator joins late
            if len(self.asked) > UNDER_WAY:
                self.enough.set()

        def answering(evaluator: Evaluator, payloads: Sequence[Payload]) -> Metrics:
            if not self.requests_seen:
                assert self.enough.wait(PATIENCE)
                time.sleep(0.7)  # time for some thirty rounds if they did not wait
                self.requests_seen = len(self.asked)
            return answer(evaluator, payloads)

        monkeypatch.setattr(EvaluationRequests, "evaluate", asking)
        monkeypatch.setattr(Evaluator, "evaluate", answering)


LONG = ("rounds=16", "protocol=fedavg", "evaluation.every=1")


@pytest.mark.slow
def test_rounds_wait_for_an_evaluator_that_falls_far_behind(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run(resolved(tiny, *LONG, "evaluation.every=0"), tmp_path / "alone")
    slow = SlowEvaluator(monkeypatch)
    outcome = run(resolved(tiny, *LONG), tmp_path / "slow")
    assert slow.requests_seen == UNDER_WAY + 1  # without the bound, all 17 would have been requested
    assert outcome.summary.model_digest == alone.summary.model_digest
    lines = [json.loads(line) for line in (tmp_path / "slow" / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines if line["kind"] == "evaluation"] == list(range(17))


@pytest.mark.slow  # the silos look for their failed coordinator for 12 s
@pytest.mark.parametrize(
    ("useless", "merged", "detail"), [(99, UNDER_WAY - 1, "--resume continues"), (1, 16, "is trained")]
)
def test_invalid_evaluations_end_a_run_that_has_no_other_evaluation_to_wait_for(
    useless: int, merged: int, detail: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, answered = Evaluator.evaluate, itertools.count()

    def answering(evaluator: Evaluator, payloads: Sequence[Payload]) -> Metrics:
        found = answer(evaluator, payloads)
        return Metrics({}, {}) if next(answered) < useless else found

    monkeypatch.setattr(Evaluator, "evaluate", answering)
    with pytest.raises(RunError, match=f"sent an invalid evaluation.*{detail}"):
        run(resolved(tiny, *LONG), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines if line["kind"] == "merge"] == list(range(1, merged + 1))


def test_with_stop_silos_a_silo_that_connects_after_the_stop_is_ended_too(tiny: Path, tmp_path: Path) -> None:
    scenario, status, ended = resolved(tiny), tmp_path / "status.json", list[str]()

    def late(uri: str, keys: Path) -> None:
        wait_for(lambda: status.exists() and read_status(status).phase == "stopped")
        run_silo(SiloArguments(run_of(scenario), "silo-00", uri, keys, tmp_path))
        ended.append("silo-00")

    outcome = run(scenario, tmp_path, silos=scenario.silo_names[1:], others=[late], stop_wanted=status.exists)
    assert outcome.phase is Phase.STOPPED and ended == ["silo-00"]
    assert not audit_run(tmp_path).findings


# ------------------------------------------------------------------------------------- a silo that is away at the end
SILOS = tuple(f"silo-0{index}" for index in range(4))


class Link:
    """A TCP link to the coordinator that can be cut."""

    def __init__(self, target: str) -> None:
        self.target = (target.rpartition(":")[0].removeprefix("tcp://"), int(target.rpartition(":")[2]))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if not self.open:
                near.close()
                continue
            far = socket.create_connection(self.target)
            self.pairs.append((near, far))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass

    def cut(self) -> None:
        self.open = False
        for pair in self.pairs:
            for each in pair:
                with contextlib.suppress(OSError):  # reset already
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
        self.pairs.clear()


@pytest.mark.slow
def test_a_silo_that_is_away_when_the_last_round_ends_is_ended_by_the_run_too(tiny: Path, tmp_path: Path) -> None:
    scenario = resolved(tiny, "rounds=8", "clock=wall", "aggregation.mode=async")
    uri = f"tcp://127.0.0.1:{free_port()}"
    link, ended, cut = Link(uri), list[str](), list[int]()

    def behind_the_link(_: str, keys: Path) -> None:
        run_silo(SiloArguments(run_of(scenario), SILOS[0], link.uri, keys, tmp_path))
        ended.append(SILOS[0])

    def watch() -> bool:
        """Cut the link after a merge; restore it once all rounds are done and the coordinator waits."""
        merges = sum(isinstance(line, MergeLine) for line in read_metrics(RunFolder(tmp_path)))
        if merges and not cut:
            cut.append(merges)
            link.cut()
        link.open = link.open or merges == scenario.rounds
        return False

    try:
        outcome = threaded_run(
            scenario, tmp_path, silos=SILOS[1:], others=[behind_the_link], uri=uri, stop_wanted=watch, stop_silos=False
        )
    finally:
        link.listener.close()
    assert outcome.summary is not None and outcome.summary.versions == scenario.rounds
    assert cut[0] < scenario.rounds and ended == [SILOS[0]]
    assert not audit_run(tmp_path).findings
