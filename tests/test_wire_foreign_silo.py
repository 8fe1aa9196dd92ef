"""A silo written from the documents alone, without fedmq, takes part in a run and trains as fedmq's silos do."""

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
import torch

from coordinator.program import CoordinatorArguments, run_coordinator
from fedmq.audit.log_checks import audit_run
from fedmq.config.scenario import Training
from fedmq.data.item_digests import item_digests
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.federation.population import build_population
from fedmq.federation.protocol import SiloFacts, Trained, take
from fedmq.wire.codec import digest
from fedmq.wire.keys import init_keys
from fedmq.wire.log_records import StartRecord, read_log
from fedmq.wire.payloads import PAYLOADS, Delta, Error, Geometry, Loss, ModalityPrototypes, PartialDelta, Payload
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.foreign import silo as foreign
from tests.foreign import training as learner
from tests.small_federation import SmallFederation, population, share
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
    assert set(audit.payloads.bytes[name]) == {
        "data_statement",
        "partial_delta",
        "modality_prototypes",
        "geometry",
        "loss",
    }


# ------------------------------------------------------------------------------------------------------- its training
TOWERS = {"visual.": "image", "text.": "text"}
EPOCHS, RATE = 3, 1e-2


def parameters(run: SmallFederation, flat: np.ndarray[Any, Any]) -> learner.Parameters:
    """A flat buffer [P] by parameter name."""
    found, at = learner.Parameters(), 0
    for entry in run.context.layout.entries:
        found[entry.name] = flat[at : at + entry.size].reshape(entry.shape).astype(np.float64)
        at += entry.size
    return found


def items(run: SmallFederation, silo: SiloFacts) -> dict[str, learner.Array]:
    held = run.shares[silo.index]
    rows = {} if held.image is None else {"visual.": held.image.numpy().astype(np.float64)}
    if held.text is not None:
        rows["text."] = held.text[torch.arange(12), torch.zeros(12, dtype=torch.int64)].numpy().astype(np.float64)
    return rows


def compare(run: SmallFederation, silo: SiloFacts, trained: Trained, options: learner.Options) -> learner.Parameters:
    """Compare a silo's reply with that of the silo written from the document; returns the latter's update."""
    sent = run.protocol.task(run.state, silo)
    down = take(sent, ModalityPrototypes)
    known = {name: getattr(down, TOWERS[name]) for bit, name in ((1, "visual."), (2, "text.")) if down.mask & bit}
    known = {name: value.astype(np.float64) for name, value in known.items()}
    model = parameters(run, run.state.theta.numpy())
    update, prototypes, loss = learner.reply(model, items(run, silo), known, options)
    delta = parameters(run, take(trained.payloads, Delta).buffer)
    assert not any(part.any() for name, part in delta.items() if name not in update)
    for name, part in update.items():
        np.testing.assert_allclose(delta[name], part, rtol=0, atol=0.02 * RATE, err_msg=name)
    assert take(trained.payloads, Loss).value == pytest.approx(loss, abs=1e-4)
    up = take(trained.payloads, ModalityPrototypes)
    for name, value in prototypes.items():
        np.testing.assert_allclose(getattr(up, TOWERS[name]), value, atol=1e-4)
    return update


@pytest.mark.parametrize("method", ["rcsr", "fedavg"])
def test_a_silo_written_from_the_document_replies_as_fedmqs_silos_do(method: str) -> None:
    kinds = ((True, True), (True, False), (False, True))
    run = population(method, kinds=kinds, training=Training(batch_size=64, local_epochs=EPOCHS))
    run.shares = {silo.index: share(silo, 12, captions=1) for silo in run.context.silos}
    default: Any = run.protocol.options  # type: ignore[attr-defined]
    weights = {name: getattr(default, name, 0.0) for name in ("tau", "lambda_anc", "lambda_a", "lambda_s")}
    options = learner.Options(**weights, epochs=EPOCHS, learning_rate=RATE)
    before: dict[str, learner.Parameters] = {}
    for _ in range(2):  # before the first merge no prototype is known
        replies = []
        for silo in run.context.silos:
            trained = run.train(silo, RATE)
            update = compare(run, silo, trained, options)
            if method == "rcsr":
                expected = learner.geometry(update, before.get(silo.name), 12)
                np.testing.assert_allclose(take(trained.payloads, Geometry).values, expected, rtol=0.02, atol=1e-3)
            before[silo.name] = update
            replies.append(run.reply(silo, trained))
        run.state = run.protocol.merge(run.state, replies, run.version).state
        run.version += 1
