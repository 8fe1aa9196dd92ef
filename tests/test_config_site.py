"""Site files: paths start at the file, mistakes are named with file, line and key, and the policy is obeyed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmq.cli import main as cli
from fedmq.config.scenario import Scenario
from fedmq.config.site import read_site
from fedmq.errors import InputError
from fedmq.wire.keys import init_keys
from tests.own_data_sites import COMMON
from tests.threaded_run import run_of


def written(folder: Path, text: str) -> Path:
    path = folder / "silo.yaml"
    path.write_text(text)
    return path


def test_paths_of_a_site_file_start_at_its_folder(tmp_path: Path) -> None:
    text = "data: {name: features, path: site0.npz}\nkeys: keys\ncache: cache\nout: run\npolicy: rules/policy.yaml\n"
    site = read_site(written(tmp_path, text))
    assert site.data is not None
    assert site.data.path == tmp_path / "site0.npz"
    assert (site.keys, site.cache, site.out) == (tmp_path / "keys", tmp_path / "cache", tmp_path / "run")
    assert site.policy == tmp_path / "rules" / "policy.yaml"


def test_a_mistake_in_a_site_file_is_named(tmp_path: Path) -> None:
    for text, place in (
        ("modalities: [sound]", ": line 1: modalities.0"),
        ("name: silo-00\ncolour: red", ": line 2: colour"),
        ("modalities: [image, image]", ": line 1: modalities"),
        ("name: x\nmodalities: [image, text\npolicy: x\n", ": line 2"),
        ("name: x\nkeys keys\nout: x\n", ": line 2"),
        ("file: other.yaml", ": line 1: file"),
        ("- data", ""),
    ):
        file = written(tmp_path, text)
        with pytest.raises(InputError) as caught:
            read_site(file)
        assert caught.value.place == f"{file}{place}", text


def test_a_silo_obeys_the_policy_of_its_site_file(tiny: Path, tmp_path: Path) -> None:
    init_keys(tmp_path / "keys", ("coordinator", "evaluator", *(f"silo-{number:02}" for number in range(4))))
    (tmp_path / "policy.yaml").write_text("up: {kinds: [nothing]}\n")
    site = written(tmp_path, "name: silo-00\nkeys: keys\nout: run\npolicy: policy.yaml\n")
    done = CliRunner().invoke(cli.app, ["silo", str(tiny), "--site", str(site)], catch_exceptions=True)
    assert isinstance(done.exception, InputError)
    assert str(tmp_path / "policy.yaml") in str(done.exception)
    assert "nothing" in str(done.exception)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("name: berlin", r"silo\.yaml: line 2: name: found 'berlin', allowed: silo-00 to silo-03"),
        ("name: silo-01", r"silo-01\.key: found 'no such file; this folder has the private key of silo-00'"),
        ("name: silo-00\ndevice: cuda:99", r"silo\.yaml: line 3: device: found 'cuda:99'"),
    ],
)
def test_a_setting_that_fits_no_silo_names_its_line_in_the_site_file(
    tiny: Path, tmp_path: Path, line: str, words: str
) -> None:
    init_keys(tmp_path / "keys", ("coordinator", "silo-00"))
    (tmp_path / "keys" / "coordinator.key").unlink()
    site = written(tmp_path, f"keys: keys\n{line}\nout: run\n")
    done = CliRunner().invoke(cli.app, ["silo", str(tiny), "--site", str(site)], catch_exceptions=True)
    assert isinstance(done.exception, InputError)
    assert re.search(words, str(done.exception))


def test_a_method_with_public_items_is_refused_on_sites_own_data() -> None:
    own = {"name": "own", **COMMON, "partition": {"kind": "own"}, "protocol": {"name": "creamfl_public"}}
    with pytest.raises(InputError, match=r"creamfl_public.*with partition\.kind own the sites state none"):
        run_of(Scenario.model_validate(own))
