"""Attacks on the coordinator of an honest run: ``python -m benchmarks.hostile [--only A,B] [--limit-s 1800]``.

For each attack the processes of ``scenarios/smoke.yaml``, without the last of five silos, are started over TCP on this
machine, and the coordinator is attacked until it ends. Printed are the model's digest, the coordinator's peak memory,
the most file descriptors that it had open, and the size of its log. The exit code is 1 if a digest differs from that of
the undisturbed run, or a run does not end.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.attacks import ATTACKS, HOSTILE, HOSTILE_SETTINGS, Relay, Target, free_port
from fedmq.config.resolve import read, resolve
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.keys import init_keys
from fedmq.wire.messages import COORDINATOR, EVALUATOR

_SCENARIO = Path(__file__).parent.parent / "scenarios" / "smoke.yaml"
_UNDISTURBED, _RELAY, _DAMAGING = "none", "relay that copies ahead", "relay that damages"
_RELAYS = {_RELAY: 0.0, _DAMAGING: 20.0}
#: Longest time of one run [s].
_RUN_SECONDS = 180.0


@dataclass(frozen=True)
class Outcome:
    """One run."""

    digest: str  # of the released model; empty if the run did not end
    seconds: float  # until the coordinator ended
    memory: float  # peak resident memory of the coordinator [MiB]
    descriptors: int  # most file descriptors that the coordinator had open
    log: float  # size of the coordinator's message log [KiB]


def main(arguments: list[str] | None = None) -> int:
    """Run the attacks; see the module."""
    import protocols

    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("--only", help=f"comma-separated names of {', '.join((*_RELAYS, *ATTACKS))}")
    parser.add_argument(
        "--limit-s", type=float, default=1800.0, help="start no attack after this time [s]; enough for all"
    )
    options = parser.parse_args(arguments)
    names = [_UNDISTURBED, *(options.only.split(",") if options.only else (*_RELAYS, *ATTACKS))]
    if unknown := [name for name in names[1:] if name not in (*_RELAYS, *ATTACKS)]:
        parser.error(f"--only: found {unknown[0]!r}, allowed: {', '.join((*_RELAYS, *ATTACKS))}")
    run = resolve(read(_SCENARIO, HOSTILE_SETTINGS), protocols).id
    columns = ("attack", "digest", "seconds", "peak memory", "growth", "descriptors", "log", "growth")
    table = Table(*columns, title="coordinator of smoke under attack; growth over the undisturbed run")
    began, console, outcomes = time.monotonic(), Console(width=110), dict[str, Outcome]()
    for name in names:
        if time.monotonic() - began > options.limit_s:
            console.print(f"time limit reached, not run: {name}")
            continue
        outcome = outcomes[name] = _run(name, run)
        console.print(f"{name}: {outcome.seconds:.0f} s", highlight=False)
        memory, log = f"{outcome.memory:.0f} MiB", f"{outcome.log:.0f} KiB"
        honest = outcomes[_UNDISTURBED]
        more = f"{outcome.memory - honest.memory:+.0f} MiB", f"{outcome.log - honest.log:+.0f} KiB"
        digest = outcome.digest[:12] or "did not end"
        table.add_row(name, digest, f"{outcome.seconds:.0f}", memory, more[0], str(outcome.descriptors), log, more[1])
    console.print(table)
    digests = {outcome.digest for outcome in outcomes.values()}
    return int(digests == {""} or len(digests) > 1)


def _run(attack: str, run: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="fedmq-hostile-") as name:
        folder, over = Path(name), threading.Event()
        keys = folder / "keys"
        init_keys(keys, (COORDINATOR, EVALUATOR, *(f"silo-0{index}" for index in range(4)), HOSTILE))
        port, began = free_port(), time.monotonic()
        out = folder / "run"
        processes = [_start(folder, "coordinator", "--bind", f"tcp://127.0.0.1:{port}", "--keys", keys, "--out", out)]
        try:
            _wait_for(port)
            relay = Relay(port, _RELAYS[attack]) if attack in _RELAYS else None
            uri = f"tcp://127.0.0.1:{relay.port if relay else port}"
            if attack in ATTACKS:
                target = Target(port, run, keys, over)
                threading.Thread(target=ATTACKS[attack], args=(target,), daemon=True).start()
            common = ("--connect", uri, "--keys", keys, "--out", out)
            processes.append(_start(folder, "evaluator", *common))
            processes += [_start(folder, "silo", "--name", f"silo-0{index}", *common) for index in range(4)]
            memory, descriptors = _peak(processes[0])
        finally:
            over.set()
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)
        summary = RunFolder(out).summary
        digest = json.loads(summary.read_text())["model_digest"] if summary.exists() else ""
        log = RunFolder(out).messages(COORDINATOR)
        size = log.stat().st_size / 1024 if log.exists() else 0.0
        return Outcome(digest, time.monotonic() - began, memory / 2**20, descriptors, size)


def _start(folder: Path, program: str, *options: object) -> subprocess.Popen[bytes]:
    settings = [part for each in HOSTILE_SETTINGS for part in ("--set", each)]
    command = [sys.executable, "-m", "fedmq", program, str(_SCENARIO), *settings, *map(str, options)]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def _wait_for(port: int) -> None:
    until = time.monotonic() + _RUN_SECONDS
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(0.2)
        else:
            return


def _peak(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Wait for a process to end; returns its peak resident memory [bytes] and most open file descriptors."""
    peak, descriptors, until = 0, 0, time.monotonic() + _RUN_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            peak = max(peak, psutil.Process(process.pid).memory_info().rss)
            descriptors = max(descriptors, psutil.Process(process.pid).num_fds())
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    return peak, descriptors


if __name__ == "__main__":
    sys.exit(main())
