"""Processes on other machines, whichever engine places them."""

from __future__ import annotations

from pathlib import Path

import protocols
from fedmq.config import loader
from fedmq.config.resolve import Source, resolve
from fedmq.launch.remote_peer import keys_of, run_peer
from fedmq.wire.keys import init_keys
from silos.program import SiloArguments


def test_a_process_on_a_machine_without_the_run_folder_returns_its_error(tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    init_keys(keys, ("coordinator", "evaluator", "silo-00"))
    run = resolve(Source(tiny, loader.load(tiny)), protocols)
    arguments = SiloArguments(run, "silo-00", "tcp://127.0.0.1:1", keys, tmp_path / "elsewhere")
    files = keys_of(arguments)
    assert sorted(files) == ["accepted/coordinator.pub", "accepted/silo-00.pub", "silo-00.key"]
    # Without its key it ends before it connects.
    del files["silo-00.key"]
    ended = run_peer(arguments, files)
    assert ended.code == 2
    assert "silo-00.key" in ended.error
    assert not (tmp_path / "elsewhere").exists()
