"""The evaluator program: measures models on the held-out split, in a process of its own so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedmq import metrics
from fedmq.audit import MessageLog
from fedmq.clock import WallClock
from fedmq.crypto import load_accepted, load_identity
from fedmq.data.share import Share, load_share
from fedmq.link import Link
from fedmq.messages import Error, Kind, Metrics, Model
from fedmq.models.two_tower import TwoTower
from fedmq.protocol import take
from fedmq.runfolder import RunFolder
from fedmq.scenario import Scenario
from fedmq.world import World, build_world, device_of, run_name

NAME = "evaluator"
_BATCH = 256


@dataclass(frozen=True)
class EvaluatorArguments:
    """How the evaluator is started.

    Args:
        scenario: as the coordinator has it.
        connect: the coordinator's URI.
        keys: folder of its own key and of the coordinator's public key.
        out: folder for its message log.
        device: ``auto``, ``cpu`` or ``cuda:N``; None takes the scenario's.
        data: folder of the prepared data where the starter knows it; None finds it.
    """

    scenario: Scenario
    connect: str
    keys: Path
    out: Path
    device: str | None = None
    data: Path | None = None


@dataclass(frozen=True)
class Embedded:
    """The held-out split in the joint space.

    Args:
        image: float32 [n, d].
        text: float32 [m, d], one row per caption.
        owner: int64 [m], the image of each caption, 0 to n - 1.
    """

    image: np.ndarray
    text: np.ndarray
    owner: np.ndarray

    def subset(self, items: np.ndarray) -> Embedded:
        """Some of the images [k] with their captions."""
        place = np.full(len(self.image), -1, np.int64)
        place[items] = np.arange(len(items))
        kept = place[self.owner] >= 0
        return Embedded(self.image[items], self.text[kept], place[self.owner[kept]])


def embed(model: TwoTower, share: Share) -> Embedded:
    """Embed every image and every caption of a share that has both."""
    if share.image is None or share.text is None:
        raise ValueError("evaluation needs both modalities")
    owner = torch.repeat_interleave(torch.arange(len(share)), share.captions)
    number = torch.cat([torch.arange(int(count)) for count in share.captions])
    with torch.no_grad():
        image = torch.cat([model.image(part) for part in torch.split(share.image, _BATCH)])
        pairs = zip(torch.split(owner, _BATCH), torch.split(number, _BATCH), strict=True)
        text = torch.cat([model.caption(share.text[item, caption]) for item, caption in pairs])
    return Embedded(image.cpu().numpy(), text.cpu().numpy(), owner.numpy())


def measure(embedded: Embedded) -> dict[str, float]:
    """Recall@{1,5,10} both ways and their means, as fractions."""
    return metrics.recalls(embedded.image, embedded.text, embedded.owner)


class Evaluator:
    """The held-out split loaded, ready to measure models.

    Args:
        scenario: as resolved.
        world: the data and who holds what of it.
        device: ``cpu`` or ``cuda:N``.
    """

    def __init__(self, scenario: Scenario, world: World, device: str) -> None:
        self.model = world.build_model(scenario, device, ("image", "text"))
        self.share = load_share(world.prepared, world.evaluated, image=True, text=True)
        place = {int(row): index for index, row in enumerate(world.evaluated)}
        self.heldout = {
            silo.name: np.array([place[int(row)] for row in rows], np.int64)
            for silo, rows in zip(world.silos, world.heldout, strict=True)
        }

    def evaluate(self, theta: np.ndarray) -> Metrics:
        """Measure a model: over the whole split, and for each silo within its own held-out share."""
        self.model.load(theta)
        embedded = embed(self.model, self.share)
        per_silo = {name: measure(embedded.subset(items)) for name, items in self.heldout.items()}
        return Metrics(measure(embedded), per_silo)


def run_evaluator(arguments: EvaluatorArguments, progress: Callable[[str], None] = lambda _: None) -> None:
    """Run the evaluator until the coordinator says stop.

    Raises:
        InputError: a key or the data is not as it must be.
    """
    torch.set_num_threads(1)
    scenario = arguments.scenario
    identity, accepted = load_identity(arguments.keys, NAME), load_accepted(arguments.keys)
    clock = WallClock()
    told = {"at": 0.0}
    run = run_name(scenario)
    log = MessageLog(RunFolder(arguments.out).messages(NAME), NAME, clock)
    log.note("started", run=run)
    link = Link(arguments.connect, identity, accepted, run, log, clock, now=lambda: told["at"])
    try:
        world = build_world(scenario, folder=arguments.data)
        evaluator = Evaluator(scenario, world, device_of(arguments.device or scenario.device))
        link.start()
        progress(f"{NAME}: {len(evaluator.share)} held-out items, connecting to {arguments.connect}")
        while True:
            message = link.receive()
            if message is None or message.header.kind is Kind.STOP:
                break
            if message.header.kind is not Kind.EVALUATE:
                continue
            told["at"] = message.header.sent_at
            header = message.header
            try:
                result: Metrics | Error = evaluator.evaluate(np.asarray(take(message.payloads, Model).buffer))
            except Exception as error:
                result = Error("evaluation_failed", f"{type(error).__name__}: {error}"[:1000])
            kind = Kind.ERROR if isinstance(result, Error) else Kind.REPLY
            link.send(
                kind, (result,), sequence=header.sequence, reply_to=header.sequence, base_version=header.base_version
            )
            progress(f"{NAME}: version {header.base_version} measured")
    finally:
        link.close()
