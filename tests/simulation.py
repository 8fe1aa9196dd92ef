"""A whole federation under random faults in one thread: ``python -m tests.simulation SEED``.

In the manner of TigerBeetle's VOPR and FoundationDB's simulation: coordinator, silos and evaluator are the programs'
own parts, with real keys and sealed messages, over :mod:`tests.simulated_network`. A seed gives a script: faults of
messages, connections, processes, disks, clocks and keys, silos that leave, lie or answer twice, torn checkpoints.
What has to hold (:mod:`tests.simulation_invariants`) is checked after each event, each checkpoint and at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import coordinator.checkpoints
import coordinator.faults
import coordinator.liveness
import coordinator.loop
import coordinator.program
import coordinator.status
import fedmq.evaluation.program
import fedmq.runs.results
import fedmq.storage.run_folder
import fedmq.wire.message_log
import silos.personal_state
from coordinator.checkpoints import KEPT
from coordinator.loop import Loop
from coordinator.program import CoordinatorArguments, run_coordinator
from coordinator.round_events import Event, Phase, Send
from fedmq.config.resolve import ResolvedRun
from fedmq.errors import DiskError, InputError, RunError
from fedmq.evaluation.program import Evaluator
from fedmq.federation.participant import open_channel
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import Update
from fedmq.models.two_tower import TwoTower
from fedmq.runs.results import read_metrics, read_summary
from fedmq.runs.run_records import MergeLine
from fedmq.storage.logs import QUIET, ErrorFile
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.channel import Channel
from fedmq.wire.codec import digest
from fedmq.wire.keys import accept_key, init_keys, load_accepted, load_identity, new_key, revoke
from fedmq.wire.message_log import StartFacts
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind, Message
from fedmq.wire.payloads import Payload
from fedmq.wire.transports.registry import TRANSPORTS, register
from silos import host as hosts
from silos.program import SiloArguments
from silos.tasks import Slots
from tests import simulated_network
from tests.simulated_network import Killed, SimulatedClock, SimulatedConnection, World
from tests.simulated_script import SILOS, Act, Script, changed
from tests.simulation_invariants import Invariants, differences_of
from tests.threaded_run import resolved, run_of

URI = "simulated://run"
_STEP_SECONDS = 1.0  # between two looks of a peer at its clock
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
    dumped: str


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
    return Federation(run, population, model, Evaluator(run.scenario, population, "cpu"), run.scenario.dump())


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
    ended: bool = False

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self.channel is not None or self.simulation.over:
            return
        self.lives, self.inbox, self.ended = self.lives + 1, [], False
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
        self.channel, self.ended = None, True

    def kill(self, away: float = 0.0) -> None:
        """The process dies as it is; it is started again a little later, or after being ``away`` [s]."""
        if self.channel is not None:
            self.channel._log._file.close()
            self.connection.close()
            self.channel = None
        world = self.simulation.world
        world.after(away + world.chance.uniform(0.1, 10.0), self.name, self.start)

    @property
    def waits(self) -> str:
        """What the process waits for."""
        if self.channel is None:
            return f"{self.name}: not running"
        state = "suspended" if self.simulation.frozen(self.name) else f"has {len(self.inbox)} messages to handle"
        return f"{self.name}: {state}, {'a session' if self.channel.has_session else 'no session'}"

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
                twice = self.name in self.simulation.script.doublers
                other = [changed(payloads, lambda buffer: buffer * np.float32(1.5))] if twice else []
                said = [[*map(digest, each)] for each in (payloads, *other)], self.simulation.world.now
                self.simulation.invariants.honest[self.name, numbers["reply_to"]] = said
                for each in other:
                    send(kind, payloads, **numbers)
                    payloads = each
            send(kind, payloads, **numbers)

        channel.send = sent  # type: ignore[method-assign]
        return channel

    def _answer(self, message: Message) -> None:
        hosts._answer(self.simulation.host, self.name, message, self.simulation.slots, lambda: None)


class EvaluatorPeer(Peer):
    """The evaluator."""

    def _open(self) -> Channel:
        simulation = self.simulation
        identity, accepted = load_identity(simulation.keys, EVALUATOR), load_accepted(simulation.keys)
        clock, run, out = SimulatedClock(simulation.world), simulation.federation.run, simulation.out
        log, channel = open_channel(run, URI, out, identity, accepted, clock=clock, now=lambda: 0.0, logger=QUIET)
        channel._deliver = self.inbox.append
        population = simulation.federation.population
        log.start(identity, accepted, StartFacts.of(run, population.prepared.content))
        channel.statement = (population.statement(None, simulation.host._items, run.id),)
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
        self.checkpoints = RunFolder(self.out).checkpoints
        self.federation = federation(script.mode)
        self.world = World(random.Random(script.seed), script.weather, script.disk, dying=self._snapshot)
        self.over, self._stopping, self._kill = False, False, False
        self._tear: float | None = None
        self._frozen: dict[str, float] = {}
        self.invariants = Invariants(self.world)
        self.world.stuck = lambda: self.invariants.waiting(peer.waits for peer in self.peers.values())
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
                if not act.events:
                    self.world.at(act.at, act.silo, lambda act=act: getattr(self, act.what)(act))
            model = self._coordinate()
            self.over = True
            for peer in (peer for peer in self.peers.values() if peer.channel is not None):
                with self.world.as_process(peer.name), contextlib.suppress(DiskError, Killed):
                    peer.end()  # its stop was lost: its operator ends it
            self.slots.close()
        self._check_end(model)
        return model

    def _coordinate(self) -> str:
        """Run the coordinator until the run is done; it is started again whenever it dies or stops."""
        for _ in range(_LIVES):
            self._stopping, self._kill, self._tear = False, False, None
            arguments = CoordinatorArguments(self.federation.run, URI, self.keys, self.out, resume=self.out.exists())
            try:
                outcome = run_coordinator(arguments, stop_wanted=self._stop_wanted)
                if outcome.phase is Phase.DONE:
                    assert outcome.summary is not None
                    return outcome.summary.model_digest
            except Killed:
                self._restore()
            except (DiskError, RunError) as error:
                self.world.struck.append(str(error))
                if RunFolder(self.out).summary.exists():  # a finished run is not resumed
                    return read_summary(RunFolder(self.out)).model_digest
                if not isinstance(error, DiskError) and "checkpoint" not in str(error):
                    raise
            self.world.listener = None
            self.invariants.ended(self.checkpoints)
            for peer in (peer for peer in self.peers.values() if peer.ended):  # the operator starts them again, too
                self.world.after(self.world.chance.uniform(0.1, 10.0), peer.name, peer.start)
            if self._tear is not None:
                self._lose_checkpoint(self._tear)
            self.world.pass_until(self.world.now + self.world.chance.uniform(0.1, 20))
        raise AssertionError(f"the coordinator was started {_LIVES} times")

    def _stop_wanted(self) -> bool:
        self.invariants.between_events()
        if self._kill:
            self._snapshot()
            raise Killed
        return self._stopping

    def _lose_checkpoint(self, share: float) -> None:
        """The disk loses a part of the newest checkpoint; the operator deletes it, as the coordinator says."""
        folders = sorted(self.checkpoints.glob("version-*"))
        if len(folders) < KEPT:
            return
        files = [path for path in sorted(folders[-1].iterdir()) if path.stat().st_nlink == 1]
        torn = self.world.chance.choice(files)
        os.truncate(torn, int(torn.stat().st_size * share))
        arguments = CoordinatorArguments(self.federation.run, URI, self.keys, self.out, resume=True)
        with pytest.raises(InputError, match="delete this one"):
            run_coordinator(arguments, stop_wanted=self._stop_wanted)
        shutil.rmtree(folders[-1])
        self.invariants.torn(folders[-1])
        self.world.struck.append(f"{torn.parent.name}/{torn.name} torn")

    # --------------------------------------------------------------------------------------------- what may happen
    def kill(self, act: Act) -> None:
        """Kill a peer."""
        self.peers[act.silo].kill()

    def leave(self, act: Act) -> None:
        """A peer ends, and comes back after minutes."""
        self.peers[act.silo].kill(away=abs(act.seconds) % 37)

    def tear_checkpoint(self, act: Act) -> None:
        """The machine of the coordinator fails, and with it the newest checkpoint."""
        self._kill, self._tear = True, abs(act.seconds) % 97 / 97

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
        self.invariants.removed[act.silo] = self.world.now

    def return_key(self, act: Act) -> None:
        """The operator accepts the removed key again."""
        accept_key(self.keys, act.silo, self.host.identities[act.silo].key.public_key())
        self.invariants.removed.pop(act.silo, None)

    def replace_key(self, act: Act) -> None:
        """A silo gets a new key, which the operator accepts, and starts again."""
        self.peers[act.silo].kill()
        identity = new_key(self.keys, act.silo, replace=True)
        self.host.identities = {**self.host.identities, act.silo: identity}
        accept_key(self.keys, act.silo, identity.key.public_key())

    def lie(self, payloads: tuple[Payload, ...], numbers: dict[str, Any]) -> tuple[tuple[Payload, ...], dict[str, Any]]:
        """What a lying silo sends in place of its reply."""
        match self.world.chance.choice(("nan", "longer", "nothing", "twice", "other task", "other version")):
            case "nan":
                payloads = changed(payloads, lambda buffer: buffer * np.nan)
            case "longer":
                payloads = changed(payloads, lambda buffer: np.concatenate([buffer, buffer]))
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
        """Keep the coordinator's files as they are at its death: its ``finally`` blocks write and send nothing."""
        if self.world.acting == COORDINATOR:
            self.world.listener = None
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
        patch.setattr(type(self.federation.run.scenario), "dump", lambda _: self.federation.dumped)
        patch.setattr(fedmq.wire.message_log, "write_whole", self._write_whole)
        patch.setattr(fedmq.wire.message_log, "try_lock", lambda _: True)  # a dead process holds no lock
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(coordinator.liveness, "LEAST_SECONDS", 60.0)  # simulated seconds cost real ones: heartbeats
        patch.setattr(coordinator.status, "STATUS_SECONDS", 1e9)
        patch.setattr(coordinator.status, "_SHOW_SECONDS", 1e9)
        append, save = fedmq.runs.results.append_line, coordinator.checkpoints.save
        handle, send, weigh, validate = Loop._handle, Loop._send, coordinator.loop.weighted, coordinator.loop.validated
        write_state = silos.personal_state.write_atomically

        def append_line(path: Path, record: Any, *, durable: bool = False) -> None:
            with fedmq.storage.run_folder.writing(path):
                world.write("metrics", 100, lambda _: None)
            append(path, record)

        def to_disk(path: Path) -> None:
            self.invariants.writing(self.checkpoints)
            world.write(
                "checkpoint", path.stat().st_size, lambda size: None if path.is_dir() else os.truncate(path, size)
            )

        def saved(folder: Path, record: Any, disk: Callable[[Path], None]) -> Path:
            made = save(folder, record, disk)
            self.invariants.saved(folder, made)
            return made

        def handled(loop: Loop, event: Event, record: int | None) -> None:
            self.invariants.before_event()
            self.invariants.loop = loop
            handle(loop, event, record)
            self.invariants.after_event(loop, event)
            for act in self.script.acts:
                if act.events and act.at == self.invariants.events:
                    world.after(0.0, act.silo, lambda act=act: getattr(self, act.what)(act))

        def sent(loop: Loop, action: Send) -> None:
            self.invariants.sent(action)
            send(loop, action)

        def validated(*arguments: Any) -> Update:
            update = validate(*arguments)
            self.invariants.received(update)
            return update

        def weighted(run_context: Any, update: Update, states: Any, version: int, merges: Any) -> Update:
            self.invariants.merged(update, version)
            return weigh(run_context, update, states, version, merges)

        def written(path: Path, write: Callable[[Path], None], *, durable: bool) -> None:
            def partly(temporary: Path) -> None:
                write(temporary)
                world.write("state", temporary.stat().st_size, lambda size: os.truncate(temporary, size))

            write_state(path, partly, durable=durable)

        patch.setattr(fedmq.runs.results, "append_line", append_line)
        patch.setattr(coordinator.faults, "to_disk", to_disk)
        patch.setattr(coordinator.checkpoints, "save", saved)
        patch.setattr(Loop, "_handle", handled)
        patch.setattr(Loop, "_send", sent)
        patch.setattr(coordinator.loop, "validated", validated)
        patch.setattr(coordinator.loop, "weighted", weighted)
        patch.setattr(silos.personal_state, "write_atomically", written)

    def _write_whole(self, file: Any, line: bytes) -> None:
        self.world.write("log", len(line), lambda size: file.write(line[:size]))
        file.write(line)

    def _check_end(self, model: str) -> None:
        """The run is complete, its logs consistent and signed, and its model the undisturbed one if it must be."""
        merges = [line for line in read_metrics(RunFolder(self.out)) if isinstance(line, MergeLine)]
        versions = [line.version for line in merges]
        assert versions == [*range(1, self.federation.run.scenario.rounds + 1)], f"merges {versions} in metrics.jsonl"
        assert (differences := differences_of(self.out, self.world.struck)) == [], differences
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
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        if folder is None:
            shutil.rmtree(made)
    return simulation


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache_folder:
        os.environ["FEDMQ_CACHE"] = cache_folder
        for given in map(int, sys.argv[1:]):
            print(f"{Script.of(given)}\nseed {given}: ok; {'; '.join(simulate(given).world.struck)}")
