"""Open the model of a finished run for retrieval: the shared model, or with ``--silo`` a personal model.

Personal models are rebuilt by the code of coordinator and silo.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

import protocols
from coordinator.release import final_evaluation_request
from fedmq.config.resolve import Source, resolve
from fedmq.config.site import read_site
from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError, RemoteWireError
from fedmq.evaluation.heldout import HeldOut
from fedmq.federation.faults import FaultSchedule
from fedmq.federation.participant import SiteData
from fedmq.federation.population import Population, build_population, run_name
from fedmq.retrieval.released_model import PersonalModel, Release, Retriever, open_release
from fedmq.runs.data_records import AgreementRecord
from fedmq.runs.results import read_summary
from fedmq.storage.cache import key_of
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress
from fedmq.wire.codec import digest
from fedmq.wire.fields import FieldError
from fedmq.wire.messages import Message
from fedmq.wire.payloads import SiloModalities
from silos.tasks import Silo, SiloArguments

_DIGITS = 12  # of a digest in an error


def open_run_model(
    root: Path, device: str | None, silo: str | None, progress: Progress | None = None, site: Path | None = None
) -> Release:
    """Open a finished run for retrieval: its shared model, or the personal one of a silo.

    The device is by default the scenario's. A personal model of a run on sites' own data needs the silo's site file.

    Raises:
        InputError: the run is not finished, has no trained shared model, or no such silo, or the silo has no trained
            personal model.
    """
    release = open_release(root, device)
    scenario = release.scenario
    names, personal_only = scenario.silo_names, protocols.traits_of(scenario).personal_only
    if site is not None:
        name, population, folder = _at_site(release, silo, site, progress)
    else:
        if scenario.data is None and (personal_only or silo is not None):
            _refuse_personal(release, silo, personal_only=personal_only)
        if silo is None:
            if personal_only:
                method = scenario.protocol.label
                allowed = f"--silo NAME ({names[0]} to {names[-1]}): silos of {method} have personal models"
                raise InputError(str(root), f"a shared model that {method} trains in part or not at all", allowed)
            return release
        if silo not in names:
            raise InputError("--silo", silo, ", ".join(names))
        name, population, folder = silo, build_population(scenario, progress, release.cache), release.run
    message = final_evaluation_request(release, population, name)
    if personal_only:
        _check_trained(release, population, name)
    own = personal_model_of(release, population, message, folder)
    return replace(release, own=own, site=None if site is None else population)


def _at_site(
    release: Release, silo: str | None, file: Path, progress: Progress | None
) -> tuple[str, Population, RunFolder]:
    """The silo of a site in a run on sites' own data, whose data and state are here: its name, data and folder."""
    scenario, site = release.scenario, read_site(file)
    if scenario.data is not None:
        raise InputError("--site", str(file), "no --site, as the run is on one data set: --silo NAME selects a silo")
    name = silo or site.name
    if name is None or name not in scenario.silo_names or site.name not in (None, name):
        place = site.place("name") if silo is None else "--silo"
        raise InputError(place, name, "the name of the site's silo: " + ", ".join(scenario.silo_names))
    run_id = run_name(scenario)
    data = SiteData.load(scenario.model_copy(update={"device": release.device}), site, run_id, progress)
    record = read_json(release.run.agreement, AgreementRecord, "what the sites of a run agreed on")
    stated = record.stated.get(name)
    if stated is None or record.agreed is None or stated.data_digest != data.content:
        found = f"data with digest {data.content[:_DIGITS]}"
        stated_then = "nothing" if stated is None else stated.data_digest[:_DIGITS]
        raise InputError(site.place("data"), found, f"the data as they were in the run: {name} stated {stated_then}")
    masks = {each: record.stated[each].payload().mask for each in scenario.silo_names if each in record.stated}
    modalities = SiloModalities(tuple(masks), np.array(list(masks.values()), np.int64))
    try:
        population = data.population(name, (record.agreed.payload(), modalities))
    except (FieldError, RemoteWireError) as error:
        raise InputError(str(release.run.agreement), str(error), "the agreement of this run's sites") from None
    return name, population, release.run if site.out is None else RunFolder(site.out / run_id)


def _refuse_personal(release: Release, silo: str | None, *, personal_only: bool) -> None:
    """Refuse to rebuild a personal model of a run whose data only the sites have."""
    allowed = "--site FILE: a personal model is rebuilt at the site, which has its data and state"
    if personal_only:
        found = f"{release.scenario.protocol.label}, whose models are personal, on sites' own data"
        raise InputError(str(release.run.root), found, allowed)
    raise InputError("--silo", str(silo), f"no --silo, which uses the shared model, or {allowed}")


def _check_trained(release: Release, population: Population, silo: str) -> None:
    """Refuse a silo whose personal model has untrained layers or an untrained tower."""
    scenario = release.scenario
    schedule = FaultSchedule(scenario.faults, scenario.seed, population.silos)
    both = []
    for each in population.silos:
        phases = schedule.phases(each, scenario.rounds)
        if any(phase.image for phase in phases) and any(phase.text for phase in phases):
            both.append(each.name)
    if silo not in both:
        missing = "captions" if population.facts(silo).image else "images"
        allowed = f"a silo that trained both towers: {', '.join(both) or 'none in this run'}"
        raise InputError("--silo", f"{silo}, which has no {missing}", allowed)
    per_silo = read_summary(release.run).per_silo
    if not per_silo[silo].participations:
        took_part = [name for name in both if per_silo[name].participations]
        allowed = f"a silo that trained: {', '.join(took_part) or 'none in this run'}"
        raise InputError("--silo", f"{silo}, which took part in no round", allowed)


#: Relative difference that the metrics of a model may have between machines.
_ROUNDING = 1e-6


class _Watched(Mapping[str, torch.Tensor]):
    """A silo's personal tensors; records whether they were read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self.looked_at = tensors, False

    def __getitem__(self, name: str) -> torch.Tensor:
        self.looked_at = True
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        self.looked_at = True
        return iter(self._tensors)

    def __len__(self) -> int:
        self.looked_at = True
        return len(self._tensors)


def personal_model_of(release: Release, population: Population, message: Message, folder: RunFolder) -> PersonalModel:
    """A silo's personal model, as the silo, whose personal state is in ``folder``, evaluated it at the end of the run.

    Raises:
        InputError: the model needs a personal state that is missing or damaged.
    """
    scenario, header = release.scenario, message.header
    run = resolve(Source(release.run.scenario, scenario), protocols, adopt=False)
    # Nothing is sent, so there is no connection, no key and no noise.
    arguments = SiloArguments(run, header.receiver, "", folder.root, folder.root, release.device)
    model = population.build_model(scenario, release.device, MODALITIES)
    silo = Silo(arguments, population, model, noise=scenario.seed)
    kept, stored = silo.store.before(header.sequence + 1), silo.store.newest(header.sequence)
    state = _Watched(kept)
    encoders, towers = silo.personal_encoders(message, state)
    found = Retriever(encoders, towers.binary, towers.dim)
    if stored is None and state.looked_at and _lost(release, silo, found):
        path = folder.silo_state(header.receiver) / f"task-{header.sequence:09d}.safetensors"
        allowed = (
            "the personal state that the silo kept after its last task: use --silo on the machine where the silo ran, "
            "or --site with its site file"
        )
        raise InputError(str(path), "no such file", allowed)
    held = hashlib.sha256(save(dict(kept))).hexdigest()
    key = key_of("own", release.files.used, header.receiver, held, [digest(payload) for payload in message.payloads])
    return PersonalModel(header.receiver, key, found)


def _lost(release: Release, silo: Silo, found: Retriever) -> bool:
    """Whether a model built without a personal state differs from the one that the silo evaluated at the end.

    It may be the same, if the method keeps no state for the silo yet, as RCSR-p before its onset.
    """
    summary, name = read_summary(release.run), silo.facts.name
    shared, reported = summary.per_silo[name], summary.personal_per_silo.get(name)
    if not shared.participations:
        return False
    if reported is None:
        return True
    if _alike(reported, shared.figures):
        return False
    heldout = HeldOut.load(release.scenario, silo.population)
    return not _alike(reported, heldout.measured(found.encoders, binary=found.binary, names=(name,)).per_silo[name])


def _alike(reported: Mapping[str, float], others: Mapping[str, float]) -> bool:
    return all(math.isclose(value, others.get(name, math.nan), rel_tol=_ROUNDING) for name, value in reported.items())
