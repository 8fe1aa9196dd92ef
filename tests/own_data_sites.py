"""Three sites with data of their own, as files and as one file for a simulated partition, and their processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedmq.cli.scenarios import resolved_file
from fedmq.config.site import read_site
from fedmq.wire.keys import init_keys
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.waiting import PATIENCE, wait_for

HOSPITALS = ("berlin", "lyon", "oslo")
COMMON: dict[str, Any] = {
    "rounds": 3,
    "protocol": "rcsr",
    "backbone": {"name": "features", "bottleneck": 8},
    "silos": {"count": 3},
    "training": {"batch_size": 16, "learning_rate": 0.001},
    "evaluation": {"every": 2},
}
#: The second site's file has images only.
IMAGE_ONLY = "silo-01"
FEDMQ = (sys.executable, "-m", "fedmq")


def arrays(items: int = 150, width: int = 12, seed: int = 0) -> dict[str, np.ndarray]:
    """Items of all hospitals in one order, of unequal numbers; some items of the third lack a modality."""
    generator = np.random.default_rng(seed)
    latent = generator.normal(size=(items, width)).astype(np.float32)
    hospital = generator.choice(HOSPITALS, items, p=(0.5, 0.3, 0.2))
    alone = (hospital == "oslo") & (np.arange(items) % 5 == 1)
    kept = generator.random(items) < 0.5
    split = np.where(np.arange(items) % 5 == 0, "test", "train")
    return {
        "image": latent + 0.3 * generator.normal(size=latent.shape).astype(np.float32),
        "text": latent + 0.3 * generator.normal(size=latent.shape).astype(np.float32),
        "labels": np.arange(items) % 4,
        "label_names": np.array(["ct", "mri", "us", "xray"]),
        "split": split,
        "keys": np.array([f"item-{row}" for row in range(items)]),
        "hospital": hospital,
        "image_present": ~(alone & kept),
        "text_present": ~(alone & ~kept),
    }


def of_hospital(found: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    rows = found["hospital"] == name
    whole = ("label_names",)
    return {key: value if key in whole else value[rows] for key, value in found.items() if key != "hospital"}


@dataclass
class Sites:
    """Folders that share nothing but the scenario and public keys."""

    root: Path
    uri: str
    site: dict[int, dict[str, Any]] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    #: Command before each program of a folder, e.g. to run it in a network namespace.
    prefix: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def scenario(self) -> Path:
        return self.root / "own.yaml"

    @property
    def run(self) -> Path:
        return self.root / "coordinator" / "run"

    def write(self, found: Mapping[str, np.ndarray] | None = None, **more: object) -> None:
        """Write the scenario, each site's file and data, and its own keys."""
        self.root.mkdir(parents=True, exist_ok=True)
        own = {"name": "own", **COMMON, "partition": {"kind": "own"}, **more}
        self.scenario.write_text(yaml.safe_dump(own))
        init_keys(self.root / "all", ("coordinator", "evaluator", *(f"silo-{index:02d}" for index in range(3))))
        found = arrays() if found is None else found
        for index, hospital in enumerate(HOSPITALS):
            folder = self.root / hospital
            folder.mkdir(exist_ok=True)
            site = {"name": f"silo-{index:02d}", "data": {"name": "features", "path": f"site{index}.npz"}}
            lacks = ("text", "text_present") if site["name"] == IMAGE_ONLY else ()
            held = {key: value for key, value in of_hospital(found, hospital).items() if key not in lacks}
            np.savez(folder / f"site{index}.npz", **held)
            site |= {"keys": "keys", "connect": self.uri, "cache": "cache", "out": "run"}
            (folder / "silo.yaml").write_text(yaml.safe_dump(site | self.site.get(index, {})))
            self._give_keys(folder, f"silo-{index:02d}")
        self._give_keys(self.root / "coordinator", "coordinator")

    def _give_keys(self, folder: Path, name: str) -> None:
        accepted = folder / "keys" / "accepted"
        accepted.mkdir(0o755, parents=True, exist_ok=True)
        for public in (self.root / "all" / "accepted").iterdir():
            (accepted / public.name).write_bytes(public.read_bytes())
        private = folder / "keys" / f"{name}.key"
        private.write_bytes((self.root / "all" / f"{name}.key").read_bytes())
        private.chmod(0o600)

    def start(self, *arguments: str, folder: str) -> subprocess.Popen[str]:
        """Start a command in a site's folder."""
        command = [
            *self.prefix.get(folder, ()),
            *FEDMQ,
            *arguments,
            *(part for each in self.settings for part in ("--set", each)),
        ]
        place = self.root / folder
        return subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def coordinator(self, *options: str) -> subprocess.Popen[str]:
        keys = str(self.root / "coordinator" / "keys")
        where = ("--keys", keys, "--bind", self.uri, "--out", str(self.run))
        return self.start("coordinator", str(self.scenario), *where, *options, folder="coordinator")

    def resumed(self) -> subprocess.Popen[str]:
        """Start the coordinator again."""
        where = ("--keys", str(self.root / "coordinator" / "keys"), "--bind", self.uri)
        return self.start("coordinator", "--resume", str(self.run), *where, folder="coordinator")

    def silo(self, index: int) -> subprocess.Popen[str]:
        folder = HOSPITALS[index]
        return self.start("silo", str(self.scenario), "--site", "silo.yaml", folder=folder)

    def silo_here(self, index: int) -> threading.Thread:
        """Start a silo as a thread of this process, which saves its imports."""
        folder, run = self.root / HOSPITALS[index], resolved_file(self.scenario, list(self.settings), manual=True)
        place = (f"silo-{index:02d}", self.uri, folder / "keys", folder / "run" / run.id)
        arguments = SiloArguments(run, *place, site=read_site(folder / "silo.yaml"))
        thread = threading.Thread(target=run_silo, args=(arguments,), daemon=True)
        thread.start()
        return thread

    def wait_for_statements(self, *silos: str) -> None:
        """Wait until the coordinator has received what silos state about their data."""
        log = self.run / "messages" / "coordinator.jsonl"

        def stated() -> bool:
            lines = log.read_text().split("\n")[:-1] if log.is_file() else []
            found = [json.loads(line) for line in lines]
            return set(silos) <= {each["sender"] for each in found if each.get("kind") == "statement"}

        wait_for(stated, PATIENCE, f"no statement from all of {silos}")

    def collect_logs(self) -> None:
        """Copy the silos' message logs into the coordinator's run folder, as an auditor does."""
        for log in self.root.glob("*/run/*/messages/silo-*.jsonl"):
            (self.run / "messages" / log.name).write_bytes(log.read_bytes())

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "summary.json").read_text()))


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What processes print until they end; they are killed if they do not."""
    try:
        return [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
