"""Rebuilds a silo's personal model after a run, as evaluated at its end, from the personal state in its folder."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from safetensors.torch import save

import protocols
from fedmq.config.resolve import Source, resolve
from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError
from fedmq.evaluation.heldout import HeldOut
from fedmq.federation.population import Population
from fedmq.retrieval.released_model import PersonalModel, Release, Retriever
from fedmq.runs.results import read_summary
from fedmq.storage.cache import key_of
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.codec import digest
from fedmq.wire.messages import Message
from silos.tasks import Silo, SiloArguments

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
    """A silo's personal model, as the silo evaluated it at the end of the run.

    Args:
        release: the run.
        population: population of its scenario.
        message: the coordinator's last evaluate message to the silo.
        folder: the silo's folder, which has its personal state.

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
    key = key_of("own", release.digest, header.receiver, held, [digest(payload) for payload in message.payloads])
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
