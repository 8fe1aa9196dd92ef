"""A silo written from the documents alone, without fedmq, takes part in a run."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.program import CoordinatorArguments, run_coordinator
from fedmq.audit.log_checks import audit_run
from fedmq.data.item_digests import item_digests
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.federation.population import build_population
from fedmq.wire.codec import digest
from fedmq.wire.keys import init_keys
from fedmq.wire.log_records import StartRecord, read_log
from fedmq.wire.payloads import PAYLOADS, Error, Geometry, Loss, ModalityPrototypes, PartialDelta, Payload
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.foreign import silo as foreign
from tests.threaded_run import resolved, run_of
from tests.waiting import PATIENCE

SILO = Path(foreign.__file__)


def test_it_uses_neither_fedmq_nor_torch() -> None:
    imported = set(re.findall(r"^(?:import|from) (\w+)", SILO.read_text(), flags=re.MULTILINE))
    assert not imported & {"fedmq", "protocols", "coordinator", "silos", "torch", "tests"}


@pytest.mark.parametrize(
    "payload",
    [
        PartialDelta("ab" * 32, ("text.a",), np.arange(3, dtype=np.float32), 7),
        PartialDelta("ab" * 32, (), np.zeros(0, np.float32), 7),
        PartialDelta("ab" * 32, ("text.a", "text.b"), np.arange(3, dtype=np.float32), 7),
        ModalityPrototypes(np.arange(4, dtype=np.float32), np.ones(4, np.float32), 3),
        Geometry(np.arange(4, dtype=np.float32)),
        Error("unsupported", "no personal model"),
        *(Loss(value) for value in (0.0, 1.0, -2.5, 0.1, 1e-4, 1e-5, 1.5e-7, 123456.789, 1e15, 1e16, 1.25e22, 1e-300)),
    ],
    ids=lambda payload: f"{payload.KIND}-{getattr(payload, 'value', '')}",
)
def test_its_digests_are_those_of_the_logs(payload: Payload) -> None:
    fields: dict[str, Any] = {name: getattr(payload, name) for name in payload.FIELDS}
    assert foreign.payload_digest(payload.KIND, fields) == digest(payload)
    assert foreign.FIELDS[payload.KIND][0] == tuple(PAYLOADS[payload.KIND].FIELDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_runs_as_the_fourth_silo_which_has_texts_only_and_the_audit_is_clean(tiny: Path, tmp_path: Path) -> None:
    # With padding, the coordinator seals its headers.
    scenario = resolved(tiny, "participation=1.0", "wire.padding=true")
    made, keys, name = run_of(scenario), tmp_path / "keys", scenario.silo_names[-1]
    init_keys(keys, ("coordinator", "evaluator", *scenario.silo_names))
    population, data = build_population(scenario), tmp_path / "data.npz"
    items = item_digests(population.prepared, scenario.dataset)
    stated = population.statement(population.facts(name), items, made.id)
    np.savez(data, items=items, counts=stated.counts)
    facts, threads = tmp_path / "run.json", list[threading.Thread]()
    started: list[subprocess.Popen[str]] = []

    def listening(uri: str) -> None:
        log = tmp_path / "messages" / f"{name}.jsonl"
        records = (record for _, record in read_log(tmp_path / "messages" / "coordinator.jsonl"))
        start = next(record for record in records if isinstance(record, StartRecord))
        facts.write_text(start.model_dump_json(include={"run", "scenario", "protocol", "privacy", "data"}))
        options = (*("--connect", uri), *("--keys", keys), *("--name", name), *("--run", facts))
        command = [sys.executable, SILO, *options, "--data", data, "--log", log]
        started.append(subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True))
        tasks = [partial(run_silo, SiloArguments(made, each, uri, keys, tmp_path)) for each in scenario.silo_names[:-1]]
        tasks.append(partial(run_evaluator, EvaluatorArguments(made, uri, keys, tmp_path)))
        threads.extend(threading.Thread(target=task, daemon=True) for task in tasks)
        for thread in threads:
            thread.start()

    outcome = run_coordinator(CoordinatorArguments(made, "tcp://127.0.0.1:*", keys, tmp_path), listening=listening)
    assert started[0].wait(PATIENCE) == 0, started[0].stderr and started[0].stderr.read()
    for thread in threads:
        thread.join(PATIENCE)
    assert outcome.summary is not None
    assert outcome.summary.per_silo[name].participations == scenario.rounds
    assert not outcome.summary.unusable_replies
    audit = audit_run(tmp_path)
    assert not audit.findings
    assert set(audit.left[name]) == {"data_statement", "partial_delta", "modality_prototypes", "geometry", "loss"}
