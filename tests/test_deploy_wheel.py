"""The wheel: one top-level package, which works beside modules called protocols, coordinator and silos."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import fedmq
from tests.waiting import PATIENCE
from tools.wheel import moved

pytestmark = pytest.mark.slow

ROOT = Path(fedmq.__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_has_one_package_with_scenarios_needs_none_of_the_report_and_is_not_for_upload(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fedmq"}
    assert {"fedmq/protocols/rcsr.py", "fedmq/scenarios/smoke.yaml", "fedmq/data/readers/openmoji_words.tsv"} <= {
        *names
    }
    assert "Private :: Do Not Upload" in metadata
    needed = {match[1] for match in re.finditer(r"^Requires-Dist: ([\w-]+)[^;]*$", metadata, re.MULTILINE)}
    assert not needed & {"plotly", "pandas"}  # a silo writes no report


def test_an_installed_wheel_runs_all_processes_beside_a_user_s_modules_of_the_same_names(
    wheel: Path, features: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    installed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(installed))
    user = tmp_path / "user"
    user.mkdir()
    for name in ("coordinator", "protocols", "silos"):
        (user / f"{name}.py").write_text("raise RuntimeError('the user\\'s module was imported')\n")
    (user / "mine.py").write_text(
        '"""Mine."""\nfrom fedmq.api.methods import AnchoredFedAvg\nclass Mine(AnchoredFedAvg):\n    """Mine."""\n'
        "PROTOCOL = Mine\n"
    )
    command = [tmp_path / "venv/bin/python", "-m", "fedmq", "scenario", "smoke", "--out", "run"]
    small = f"data={{name: features, path: {features}}}", "backbone={name: features}", "partition.clusters=5"
    for setting in ("rounds=1", "protocol=./mine.py", *small):
        command += ["--set", setting]
    environment = {**os.environ, "PYTHONPATH": str(user)}
    done = subprocess.run(
        command, check=False, cwd=user, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert (user / "run/report.html").is_file()


def test_an_import_that_the_build_hook_cannot_change_is_refused() -> None:
    assert moved("import protocols\nfrom silos.host import x\n", "a.py") == (
        "from fedmq import protocols\nfrom fedmq.silos.host import x\n"
    )
    with pytest.raises(ValueError, match=r"a\.py: line 1"):
        moved("import protocols.parts.memory\n", "a.py")
