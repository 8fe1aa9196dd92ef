"""Rebuilds the final evaluation request of a finished run to a silo from the run's last checkpoint."""

from __future__ import annotations

from coordinator import checkpoint_files as checkpoints
from coordinator.admission import OwnDataAdmission
from coordinator.build_run_context import run_context_of
from coordinator.rounds import Rounds
from fedmq.errors import InputError
from fedmq.federation.agreement import RunData
from fedmq.federation.population import Population, run_name
from fedmq.retrieval.released_model import OtherModelError, Release
from fedmq.runs.data_records import AgreementRecord
from fedmq.storage.json_files import read_json
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message


def final_evaluation_request(release: Release, population: Population, silo: str) -> Message:
    """The request that had a silo evaluate its personal model: the number of its last settled task, and the payloads of
    a task based on the final version.

    Args:
        release: the released run.
        population: the silos and their data; of a run on sites' own data that of one site.
        silo: name of the silo.

    Raises:
        InputError: the method has no personal models, or the checkpoint is missing, damaged or of other data.
        OtherModelError: the checkpoint has another model than the released one.
    """
    scenario, folder = release.scenario, release.run
    data = population.counted(scenario) if population.agreed is None else _agreed(release)
    run_context, _ = run_context_of(scenario, data, folder)
    if not run_context.traits.personalised:
        method = scenario.protocol.label
        allowed = f"the shared model: with this run's options silos of {method} have no personal models"
        raise InputError(str(folder.root), f"no personal model of {silo}", allowed)
    saved = checkpoints.load(folder.checkpoints)
    if saved is None:
        allowed = "the last checkpoint of the run; use --silo on the machine where the coordinator and the silo ran"
        raise InputError(str(folder.checkpoints), "no checkpoint", allowed)
    checkpoints.check_fits(folder.checkpoints, saved, scenario.rounds, scenario.silo_names)
    if saved.data not in ("", run_context.data):
        found = f"data of other content than the run was made with ({run_context.data[:12]})"
        raise InputError(f"{folder.root}: the data", found, f"the run's data ({saved.data[:12]})")
    rounds = Rounds.from_record(run_context.plan, saved.rounds)
    state = saved.states[rounds.version]
    digest = run_context.context.layout.model_digest(state.theta.numpy())
    if digest != release.digest:
        raise OtherModelError(folder.checkpoints / f"version-{rounds.version:06d}", digest, release.digest)
    sequence, version = rounds.settled.get(silo, 0), rounds.version
    header = Header(
        run=run_name(scenario),
        kind=Kind.EVALUATE,
        sender=COORDINATOR,
        receiver=silo,
        sequence=sequence,
        sent_at=0.0,
        base_version=version,
    )
    return Message(header, run_context.protocol.task(state, run_context.facts_at(silo, version)))


def _agreed(release: Release) -> RunData:
    """The facts about the data of a run on sites' own data.

    Raises:
        InputError: its agreement is missing, damaged or of another run.
    """
    scenario = release.scenario
    known = read_json(release.run.agreement, AgreementRecord, "what the silos of this run agreed on")
    minimum = scenario.participation.minimum
    run = run_name(scenario)
    admission = OwnDataAdmission(scenario.silo_names, run, evaluator=scenario.evaluator, known=known, minimum=minimum)
    return admission.run_data(release.cache)
