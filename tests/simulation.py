"""A whole federation under random faults in one thread: ``python -m tests.simulation SEED``.

In the manner of TigerBeetle's VOPR and FoundationDB's simulation: coordinator, silos and evaluator are the programs'
own parts, with real keys and sealed messages, over :mod:`tests.simulated_network`. A seed gives a script: lost, late,
doubled and damaged messages, cut connections, processes killed at any message or within a write, full disks, a wall
clock that jumps, removed and replaced keys, lying silos. Invariants are checked at each merge, at each checkpoint and
at the end.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import coordinator.checkpoints
import coordinator.faults
import coordinator.loop
import coordinator.program
import fedmq.evaluation.program
import fedmq.runs.results
import fedmq.storage.run_folder
import fedmq.wire.message_log
from coordinator.program import CoordinatorArguments, run_coordinator
from coordinator.rounds import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.config.resolve import ResolvedRun
from fedmq.errors import DiskError, InputError, RunError
from fedmq.evaluation.program import Evaluator, EvaluatorArguments
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import Update
from fedmq.models.two_tower import TwoTower
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import MergeLine
from fedmq.storage.logs import QUIET, ErrorFile
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.channel import Channel
from fedmq.wire.codec import digest
from fedmq.wire.keys import accept_key, init_keys, load_accepted, load_identity, new_key, revoke
from fedmq.wire.message_log import StartFacts
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind, Message
from fedmq.wire.payloads import Delta, PartialDelta, Payload
from fedmq.wire.transports.registry import TRANSPORTS, register
from silos import host as hosts
from silos.program import SiloArguments
from silos.tasks import Slots
from tests import simulated_network
from tests.simulated_network import Killed, SimulatedClock, SimulatedConnection, World
from tests.simulated_script import SILOS, Act, Script
from tests.threaded_run import resolved, run_of

URI = "simulated://run"
#: Time after which a removed key has an effect, and messages sent before have arrived [s].
_REMOVAL_SECONDS = 1.0 + 0.2
#: Interval between two looks of a peer at its clock [s].
_STEP_SECONDS = 0.5
#: Lives of a coordinator before it counts as stuck.
_LIVES = 40


# ------------------------------------------------------------------------------------------- what all runs have alike
@dataclass(frozen=True)
class Federation:
    """The data, the model and the run of a mode, which no run changes."""

    run: ResolvedRun
    population: Population
    model: TwoTower
    evaluator: Evaluator


def _memory() -> str | None:
    """A folder in memory, if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@cache
def _scenario_file() -> Path:
    """A scenario of four silos on 48 items of tiny features."""
    kept = tempfile.TemporaryDirectory(prefix="fedmq-simulation-")
    atexit.register(kept.cleanup)
    folder, generator = Path(kept.name), np.random.default_rng(5)
    latent = generator.normal(size=(48, 12))
    np.savez(
        folder / "tiny.npz",
        image=(latent + 0.3 * generator.normal(size=latent.shape)).astype(np.float32),
        text=(latent + 0.3 * generator.normal(size=latent.shape)).astype(np.float32)[:, None],
        labels=np.arange(48) % 4,
        split=np.array(["train"] * 32 + ["val"] * 6 + ["test"] * 10),
    )
    settings = {
        "name": "simulated",
        "rounds": 4,
        "participation": 0.75,
        "protocol": {"name": "fedavg"},
        "data": {"name": "features", "path": str(folder / "tiny.npz")},
        "backbone": {"name": "features", "bottleneck": 2},
        "silos": {"count": len(SILOS)},
        "missing_modality": {"silos": {"silo-02": "image", "silo-03": "text"}},
        "training": {"learning_rate": 0.003, "local_epochs": 1},
        "partition": {"kind": "iid"},
        "evaluation": {"every": 2},
    }
    (folder / "simulated.yaml").write_text(yaml.safe_dump(settings))
    return folder / "simulated.yaml"


@cache
def federation(mode: tuple[str, ...]) -> Federation:
    """What the runs of a mode have alike."""
    run = run_of(resolved(_scenario_file(), *mode))
    population = build_population(run.scenario)
    model = population.build_model(run.scenario, "cpu", ("image", "text"))
    return Federation(run, population, model, Evaluator(run.scenario, population, "cpu"))


@cache
def undisturbed(mode: tuple[str, ...]) -> str:
    """The digest of the model of a mode without any fault."""
    with tempfile.TemporaryDirectory(prefix="fedmq-simulation-", dir=_memory()) as folder:
        return Simulation(Script(0, mode), Path(folder)).run()


# ------------------------------------------------------------------------------------------------------------ peers
@dataclass
class Peer:
    """A silo or the evaluator, which may be killed and started again."""

    simulation: Simulation
    name: str
    inbox: list[Message] = field(default_factory=list)
    channel: Channel | None = None
    lives: int = 0

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self.channel is not None or self.simulation.over:
            return
        self.lives, self.inbox = self.lives + 1, []
        try:
            self.channel, world = self._open(), self.simulation.world
            self.connection = SimulatedConnection(world, URI, self.name, self.step)
            self.channel.attach(self.connection)
        except (Killed, DiskError, RunError, InputError):
            self.kill()
            return
        self._look(self.lives)

    def _look(self, life: int) -> None:
        """Look at the clock now and then, as long as this life lasts."""
        if self.channel is not None and self.lives == life:
            self.simulation.world.after(_STEP_SECONDS, self.name, lambda: self._look(life))
            self.step()

    def step(self) -> None:
        """Send and receive; what arrived is handled when the process is free."""
        channel, world = self.channel, self.simulation.world
        if channel is None or self.simulation.frozen(self.name):
            return
        before = len(self.inbox)
        try:
            channel.step(self.connection, 0.0)
            if channel.stopped:
                self.end()
            elif len(self.inbox) > before == 0:
                world.after(world.chance.uniform(0.01, 2.0), self.name, lambda life=self.lives: self._handle(life))
        except (Killed, DiskError, RunError, InputError):
            self.kill()

    def _handle(self, life: int) -> None:
        """Handle the oldest message."""
        if self.channel is None or self.lives != life:
            return
        world = self.simulation.world
        try:
            self._answer(self.inbox[0])
            del self.inbox[0]
            self.channel.step(self.connection, 0.0)
        except (Killed, DiskError, RunError, InputError):
            self.kill()
            return
        if self.inbox:
            world.after(world.chance.uniform(0.01, 2.0), self.name, lambda: self._handle(life))

    def end(self) -> None:
        """The process has received the run's end."""
        assert self.channel is not None
        self.channel.close(0.0)
        self.connection.close()
        self.channel = None

    def kill(self) -> None:
        """The process dies as it is; it is started again a little later."""
        if self.channel is not None:
            self.channel._log._file.close()
            self.connection.close()
            self.channel = None
        world = self.simulation.world
        world.after(world.chance.uniform(0.1, 10.0), self.name, self.start)

    def _open(self) -> Channel:
        raise NotImplementedError

    def _answer(self, message: Message) -> None:
        raise NotImplementedError


class SiloPeer(Peer):
    """A silo, as one of a host's."""

    def _open(self) -> Channel:
        host = self.simulation.host
        host._recent.pop(self.name, None)
        channel = host._open(self.name, self.inbox.append)
        host.channels.channels[self.name] = channel
        send = channel.send

        def sent(kind: Kind, payloads: tuple[Payload, ...], **numbers: Any) -> None:
            if kind is Kind.REPLY and self.name in self.simulation.script.liars:
                payloads, numbers = self.simulation.lie(payloads, numbers)
            elif kind is Kind.REPLY:
                self.simulation.honest[self.name, numbers["reply_to"]] = (
                    [*map(digest, payloads)],
                    self.simulation.world.now,
                )
            send(kind, payloads, **numbers)

        channel.send = sent  # type: ignore[method-assign]
        return channel

    def _answer(self, message: Message) -> None:
        hosts._answer(self.simulation.host, self.name, message, self.simulation.slots, lambda: None)


class EvaluatorPeer(Peer):
    """The evaluator."""

    def _open(self) -> Channel:
        simulation = self.simulation
        arguments = EvaluatorArguments(simulation.federation.run, URI, simulation.keys, simulation.out)
        identity, accepted = load_identity(simulation.keys, EVALUATOR), load_accepted(simulation.keys)
        log, channel = fedmq.evaluation.program._log_and_channel(arguments, identity, accepted, lambda: 0.0, QUIET)
        channel._deliver = self.inbox.append
        population = simulation.federation.population
        log.start(identity, accepted, StartFacts.of(arguments.run, population.prepared.content))
        channel.statement = (population.statement(None, simulation.host._items, arguments.run.id),)
        return channel

    def _answer(self, message: Message) -> None:
        assert self.channel is not None
        if message.header.kind is Kind.EVALUATE:
            errors = ErrorFile(RunFolder(self.simulation.out).errors(EVALUATOR))
            evaluator = self.simulation.federation.evaluator
            fedmq.evaluation.program._answer(self.channel, evaluator, message, QUIET, errors)


# ------------------------------------------------------------------------------------------------------- simulation
class Simulation:
    """One run of a script in a folder."""

    def __init__(self, script: Script, folder: Path) -> None:
        self.script, self.out, self.keys = script, folder / "run", folder / "keys"
        self.federation = federation(script.mode)
        self.world = World(random.Random(script.seed), script.weather, script.disk, dying=self._snapshot)
        self.over, self._ended, self._stopping, self._kill = False, dict[str, float](), False, False
        self._frozen: dict[str, float] = {}
        #: Digests of what each honest silo sent in reply to each task, and when.
        self.honest: dict[tuple[str, int | None], tuple[list[str], float]] = {}
        self._removed: dict[str, float] = {}
        self._merged: dict[tuple[str, int | None], int] = {}
        self._validated: dict[tuple[str, int | None], list[str]] = {}
        init_keys(self.keys, (COORDINATOR, EVALUATOR, *SILOS))
        silo = SiloArguments(self.federation.run, SILOS[0], URI, self.keys, self.out)
        identities = {name: load_identity(self.keys, name) for name in SILOS}
        accepted, clock = load_accepted(self.keys), SimulatedClock(self.world)
        arguments = hosts.HostArguments(SILOS, silo, 1)
        self.host = hosts.Host(
            arguments, self.federation.population, self.federation.model, accepted, identities, clock
        )
        self.host.__dict__["channels"] = SimpleNamespace(channels={})
        self.slots = Slots(folder / "slots" / "run", 1)
        self.peers: dict[str, Peer] = {name: SiloPeer(self, name) for name in SILOS}
        self.peers[EVALUATOR] = EvaluatorPeer(self, EVALUATOR)

    def run(self) -> str:
        """Run it to its end; returns the digest of the model.

        Raises:
            AssertionError: an invariant does not hold.
        """
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            for peer in self.peers.values():
                self.world.after(self.world.chance.uniform(0, 3), peer.name, peer.start)
            for act in self.script.acts:
                self.world.at(act.at, COORDINATOR, lambda act=act: getattr(self, act.what)(act))
            model = self._coordinate()
            self.over = True
            for peer in self.peers.values():
                if peer.channel is not None:  # its stop was lost: its operator ends it
                    peer.end()
            self.slots.close()
        self._check_end(model)
        return model

    def _coordinate(self) -> str:
        """Run the coordinator until the run is done; it is started again whenever it dies or stops."""
        for _ in range(_LIVES):
            self._stopping = self._kill = False
            arguments = CoordinatorArguments(self.federation.run, URI, self.keys, self.out, resume=self.out.exists())
            try:
                outcome = run_coordinator(arguments, stop_wanted=self._stop_wanted)
                if outcome.phase is Phase.DONE:
                    assert outcome.summary is not None
                    return outcome.summary.model_digest
            except Killed:
                self._restore()
            except DiskError as error:
                self.world.struck.append(str(error))
            except RunError as error:
                self.world.struck.append(str(error))
                if "checkpoint" not in str(error):
                    raise
            self.world.listener = None
            self.world.pass_until(self.world.now + self.world.chance.uniform(0.1, 40))
        raise AssertionError(f"the coordinator was started {_LIVES} times")

    def _stop_wanted(self) -> bool:
        if self._kill:
            self._snapshot()
            raise Killed
        return self._stopping

    # --------------------------------------------------------------------------------------------- what may happen
    def kill(self, act: Act) -> None:
        """Kill a peer."""
        self.peers[act.silo].kill()

    def kill_coordinator(self, _act: Act) -> None:
        """Kill the coordinator at its next event."""
        self._kill = True

    def stop_coordinator(self, _act: Act) -> None:
        """Stop the coordinator."""
        self._stopping = True

    def cut(self, act: Act) -> None:
        """Break a peer's connection."""
        peer = self.peers[act.silo]
        if peer.channel is not None:
            peer.connection.connect()

    def freeze(self, act: Act) -> None:
        """Suspend a peer for a while."""
        self._frozen[act.silo] = self.world.now + abs(act.seconds) % 100

    def frozen(self, name: str) -> bool:
        """Whether a peer is suspended."""
        return self.world.now < self._frozen.get(name, 0.0)

    def shift_clock(self, act: Act) -> None:
        """Set the machine's clock forward or back."""
        self.world.step_s += act.seconds

    def remove_key(self, act: Act) -> None:
        """The operator removes a silo's key."""
        revoke(self.keys, act.silo)
        self._removed[act.silo] = self.world.now

    def return_key(self, act: Act) -> None:
        """The operator accepts the removed key again."""
        accept_key(self.keys, act.silo, self.host.identities[act.silo].key.public_key())
        self._removed.pop(act.silo, None)

    def replace_key(self, act: Act) -> None:
        """A silo gets a new key, which the operator accepts, and starts again."""
        self.peers[act.silo].kill()
        identity = new_key(self.keys, act.silo, replace=True)
        self.host.identities = {**self.host.identities, act.silo: identity}
        accept_key(self.keys, act.silo, identity.key.public_key())

    def lie(self, payloads: tuple[Payload, ...], numbers: dict[str, Any]) -> tuple[tuple[Payload, ...], dict[str, Any]]:
        """What a lying silo sends in place of its reply."""
        chance = self.world.chance

        def changed(change: Callable[[np.ndarray], np.ndarray]) -> tuple[Payload, ...]:
            return tuple(
                replace(each, buffer=change(np.array(each.buffer))) if isinstance(each, Delta | PartialDelta) else each
                for each in payloads
            )

        match chance.choice(("nan", "longer", "nothing", "twice", "other task", "other version")):
            case "nan":
                payloads = changed(lambda buffer: buffer * np.nan)
            case "longer":
                payloads = changed(lambda buffer: np.concatenate([buffer, buffer]))
            case "nothing":
                payloads = ()
            case "twice":
                payloads = payloads * 2
            case "other task":
                numbers = {**numbers, "sequence": numbers["sequence"] + 7, "reply_to": numbers["reply_to"] + 7}
            case _:
                numbers = {**numbers, "base_version": numbers["base_version"] + 1}
        return payloads, numbers

    # ----------------------------------------------------------------------------------------- death of a coordinator
    def _own(self) -> list[Path]:
        """What the coordinator has written: all of the run folder but the files of the peers."""
        peers = {*SILOS, EVALUATOR}
        files = [path for path in self.out.rglob("*") if path.is_file()]
        parts = [(path, path.relative_to(self.out).parts) for path in files]
        return [
            path for path, each in parts if each[:2] != ("checkpoints", "silos") and Path(each[-1]).stem not in peers
        ]

    def _snapshot(self) -> None:
        """Keep the coordinator's files as they are at its death: what its ``finally`` blocks do does not happen."""
        if self.world.acting == COORDINATOR:
            self._files = {path: path.read_bytes() for path in self._own()}

    def _restore(self) -> None:
        for path in self._own():
            if path not in self._files:
                path.unlink()
        for path, content in self._files.items():
            if not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        for folder in (self.out / "checkpoints").glob("*version-*"):
            if not any(folder.iterdir()):
                folder.rmdir()

    # ------------------------------------------------------------------------------------------------------ patches
    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        """Give the programs the world's time, network and disk, and look at each merge and checkpoint."""
        world = self.world
        patch.setattr(_PRESENT, "world", world)
        patch.setattr(coordinator.program, "clock_for", lambda _kind, start=0.0: SimulatedClock(world, start))
        patch.setattr(coordinator.program, "build_population", lambda *_, **__: self.federation.population)
        patch.setattr(coordinator.program.run_report, "write", lambda *_: None)
        patch.setattr(fedmq.evaluation.program, "WallClock", lambda: SimulatedClock(world))
        patch.setattr(fedmq.wire.message_log, "write_all", self._write_all)
        patch.setattr(fedmq.wire.message_log, "try_lock", lambda _: True)  # a dead process holds no lock
        patch.setattr(os, "fsync", lambda _: None)
        append, save = fedmq.runs.results.append_line, coordinator.checkpoints.save
        validate, weigh = coordinator.loop.validated, coordinator.loop.weighted

        def append_line(path: Path, record: Any, *, durable: bool = False) -> None:
            with fedmq.storage.run_folder.writing(path):
                world.write(100, lambda _: None)
            append(path, record)

        def to_disk(path: Path) -> None:
            world.write(0, lambda _: None)

        def saved(folder: Path, record: Any, disk: Callable[[Path], None]) -> Path:
            made = save(folder, record, disk)
            loaded = coordinator.checkpoints.load(folder)
            assert loaded is not None and loaded.rounds.version == record.rounds.version, "no restorable checkpoint"
            return made

        def validated(message: Message, *more: Any) -> Update:
            update = validate(message, *more)
            self._validated[message.header.sender, update.sequence] = [*map(digest, message.payloads)]
            return update

        def weighted(run_context: Any, update: Update, states: Any, version: int, merges: Any) -> Update:
            self._check_merged(update, version)
            return weigh(run_context, update, states, version, merges)

        patch.setattr(fedmq.runs.results, "append_line", append_line)
        patch.setattr(coordinator.faults, "to_disk", to_disk)
        patch.setattr(coordinator.checkpoints, "save", saved)
        patch.setattr(coordinator.loop, "validated", validated)
        patch.setattr(coordinator.loop, "weighted", weighted)

    def _write_all(self, file: Any, line: bytes) -> None:
        self.world.write(len(line), lambda size: file.write(line[:size]))
        file.write(line)

    # --------------------------------------------------------------------------------------------------- invariants
    def _check_merged(self, update: Update, version: int) -> None:
        """A merged reply is one that its silo sent, while its key was accepted, and is in no other merge."""
        key = (update.silo.name, update.sequence)
        assert key in self.honest, f"{key} is merged, but its silo never sent it"
        sent, at = self.honest[key]
        assert self._validated[key] == sent, f"{key} is not what its silo sent"
        removed = self._removed.get(update.silo.name)
        assert removed is None or at < removed + _REMOVAL_SECONDS, f"{key} is merged, but its key was removed"
        assert self._merged.setdefault(key, version) == version, f"{key} is merged twice"

    def _check_end(self, model: str) -> None:
        """The run is complete, its logs consistent and signed, and its model the undisturbed one if it must be."""
        merges = [line for line in read_metrics(RunFolder(self.out)) if isinstance(line, MergeLine)]
        assert [line.version for line in merges] == list(range(1, self.federation.run.scenario.rounds + 1))
        findings = [f"{finding.place}: {finding.what}" for finding in audit_run(self.out).findings]
        assert not findings, findings
        if self.script.harmless and self.script != Script(0, self.script.mode):
            assert model == undisturbed(self.script.mode), "another model than that of the undisturbed run"


_PRESENT = SimpleNamespace(world=None)
if "simulated" not in TRANSPORTS:
    register("simulated", simulated_network.transport(lambda: _PRESENT.world))


def simulate(seed: int, folder: Path | None = None) -> Simulation:
    """Run the script of a seed in a folder, or in a temporary one.

    Raises:
        AssertionError: an invariant does not hold.
    """
    made = folder or Path(tempfile.mkdtemp(prefix="fedmq-simulation-", dir=_memory()))
    simulation = Simulation(Script.of(seed), made)
    try:
        simulation.run()
    finally:
        if folder is None:
            shutil.rmtree(made)
    return simulation


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache_folder:
        os.environ["FEDMQ_CACHE"] = cache_folder
        for given in map(int, sys.argv[1:]):
            print(Script.of(given))
            print(f"seed {given}: ok; {'; '.join(simulate(given).world.struck)}")
