"""Signatures of model folders: who released these files, and were they changed since?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedmq.errors import InputError
from fedmq.runs.release import SIGNATURE, sign_model, verify_model
from fedmq.wire.keys import init_keys, load_identity
from tests.command_line import printed


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    init_keys(tmp_path / "keys", ["coordinator", "other"])
    return tmp_path / "keys"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "README.md", "onnx/image.onnx"):
        (folder / name).write_text(f"content of {name}")
    return folder


def test_a_signed_folder_is_verified_also_after_a_search(keys: Path, model: Path) -> None:
    words = printed("sign", model, "--keys", keys).split("words of the key: ")[1].strip()
    (model / "gallery" / "photos-1").mkdir(parents=True)
    (model / "gallery" / "photos-1" / "items.jsonl").write_text("{}")
    assert "4 files are as coordinator signed them" in printed("verify", model, "--keys", keys)
    assert words in printed("verify", model)


def test_a_changed_folder_and_a_signature_of_another_key_are_exit_code_3(
    keys: Path, model: Path, tmp_path: Path
) -> None:
    init_keys(tmp_path / "stranger", ["coordinator"])
    sign_model(model, load_identity(tmp_path / "stranger", "coordinator"))
    told = printed("verify", model, "--keys", keys, "--json", code=3)
    assert json.loads(told)["differences"] == ["signed with another key than the accepted one of coordinator"]
    sign_model(model, load_identity(keys, "coordinator"))
    (model / "model.safetensors").write_text("other")
    (model / "onnx" / "image.onnx").unlink()
    (model / "more.py").write_text("code")
    told = printed("verify", model, "--keys", keys, code=3)
    for line in ("model.safetensors: changed since", "onnx/image.onnx: missing", "more.py: not signed"):
        assert line in told


def test_an_edited_signature_is_refused(keys: Path, model: Path) -> None:
    sign_model(model, load_identity(keys, "coordinator"))
    path = model / SIGNATURE
    signed = json.loads(path.read_text())
    for edit in (
        {"signer": "other"},
        {"files": {"config.json": "0" * 64}},
        {"files": {"../config.json": "0" * 64}},
        {"signature": "00"},
        {"format": 2},
    ):
        path.write_text(json.dumps({**signed, **edit}))
        with pytest.raises(InputError, match=r"signature\.json"):
            verify_model(model)


def test_a_folder_without_signature_and_one_with_links_are_refused(keys: Path, model: Path) -> None:
    with pytest.raises(InputError, match=r"no signature\.json"):
        verify_model(model)
    (model / "link").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="link: found 'a link'"):
        sign_model(model, load_identity(keys, "coordinator"))
    (model / "link").unlink()
    (model / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        sign_model(model, load_identity(keys, "coordinator"))
