"""Keys on disk: private, never overwritten, and revocable."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedmq.errors import InputError, RunError
from fedmq.wire import keys
from fedmq.wire.key_requests import read_request, statement_of
from fedmq.wire.keys import fingerprint, init_keys, load_accepted, load_identity, public_key_of, public_pem, revoke
from fedmq.wire.transports.registry import connect, listen
from fedmq.wire.transports.tickets import ConnectionKeys, ListenerKeys
from tests.wire_examples import NAMES

# Keys on disk


def test_keys_are_private_and_load_again(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    init_keys(directory, NAMES)
    for name in NAMES:
        assert (directory / f"{name}.key").stat().st_mode & 0o777 == 0o600
    keys = load_accepted(directory)
    assert sorted(keys) == sorted(NAMES)
    identity = load_identity(directory, "silo-00")
    assert identity.name == "silo-00"
    assert fingerprint(identity) == fingerprint(keys["silo-00"])
    assert len({fingerprint(key) for key in keys.values()}) == 4


@pytest.mark.parametrize("present", ["silo-01.key", "accepted/silo-01.pub"])
def test_existing_keys_are_never_overwritten(tmp_path: Path, present: str) -> None:
    init_keys(tmp_path, ["silo-01"])
    for path in {"silo-01.key", "accepted/silo-01.pub"} - {present}:
        (tmp_path / path).unlink()
    before = (tmp_path / present).read_bytes()
    with pytest.raises(InputError, match=f"{present}: found 'an existing key'"):
        init_keys(tmp_path, ["silo-00", "silo-01"])
    assert (tmp_path / present).read_bytes() == before
    assert not (tmp_path / "silo-00.key").exists()


def test_partially_written_keys_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, count = os.fdopen, iter(range(9))

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, raw: bytes) -> None:
            self.file.write(raw[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(descriptor: int, mode: str) -> Any:
        file = opened(descriptor, mode)
        return Full(file) if next(count) == 3 else file

    monkeypatch.setattr(keys.os, "fdopen", full)
    with pytest.raises(RunError, match="No space left"):
        init_keys(tmp_path, ["silo-00", "silo-01"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.undo()
    init_keys(tmp_path, ["silo-00", "silo-01"])
    assert set(load_accepted(tmp_path)) == {"silo-00", "silo-01"}


def test_a_key_created_concurrently_by_another_process_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.suffix not in (".key", ".pub") and exists(path))
    (tmp_path / "silo-01.key").write_text("another's")
    with pytest.raises(InputError, match=r"silo-01\.key: found 'an existing key'"):
        init_keys(tmp_path, ["silo-00", "silo-01"])
    assert (tmp_path / "silo-01.key").read_text() == "another's"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["silo-01.key"]


def test_a_key_that_cannot_be_moved_is_a_one_line_error(tmp_path: Path) -> None:
    init_keys(tmp_path, ["silo-01"])
    (tmp_path / "revoked").write_text("in the way")
    with pytest.raises(InputError, match="a folder that can be written"):
        revoke(tmp_path, "silo-01")
    assert "silo-01" in load_accepted(tmp_path)


def test_a_revoked_key_is_refused_but_kept_on_record(tmp_path: Path) -> None:
    init_keys(tmp_path, NAMES)
    print_before = fingerprint(load_accepted(tmp_path)["silo-00"])
    revoke(tmp_path, "silo-00")
    assert "silo-00" not in load_accepted(tmp_path)
    assert [path.name for path in (tmp_path / "revoked").iterdir()] == [f"silo-00-{print_before[:16]}.pub"]
    with pytest.raises(InputError, match="silo-00"):
        revoke(tmp_path, "silo-00")


def test_invalid_key_names_are_input_errors(tmp_path: Path) -> None:
    for names in (["../evil"], ["Silo"], ["a", "a"], [""]):
        with pytest.raises(InputError):
            init_keys(tmp_path, names)
    assert not list(tmp_path.rglob("*.key"))


def test_invalid_private_keys_are_input_errors(tmp_path: Path) -> None:
    init_keys(tmp_path, ["silo-00"])
    path = tmp_path / "silo-00.key"
    path.chmod(0o644)
    with pytest.raises(InputError, match="0600"):
        load_identity(tmp_path, "silo-00")
    path.chmod(0o600)
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for content in (b"not a key", X25519PrivateKey.generate().private_bytes(*pem), None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(InputError, match=r"silo-00\.key"):
            load_identity(tmp_path, "silo-00")


def test_invalid_public_keys_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="accepted"):
        load_accepted(tmp_path)
    init_keys(tmp_path, ["silo-00"])
    path = tmp_path / "accepted" / "silo-00.pub"
    (tmp_path / "accepted" / "silo-01.pub").write_bytes(path.read_bytes())
    with pytest.raises(InputError, match="the same key as silo-00"):
        load_accepted(tmp_path)
    (tmp_path / "accepted" / "silo-01.pub").unlink()
    pem = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    for content in (b"x", X25519PrivateKey.generate().public_key().public_bytes(*pem)):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"silo-00\.pub"):
            load_accepted(tmp_path)


@pytest.mark.parametrize("target", ["nothing", "silo-01.pub"])
def test_a_link_without_a_file_is_refused_and_withdraws_the_key_of_its_name(target: str, tmp_path: Path) -> None:
    init_keys(tmp_path, NAMES)
    accepted, path = load_accepted(tmp_path), tmp_path / "accepted" / "silo-01.pub"
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(InputError, match=r"accepted/silo-01\.pub: .*, allowed: a readable key file"):
        load_accepted(tmp_path)
    assert accepted.refresh() == ["silo-01"]
    assert "silo-01.pub" in accepted.problem


@pytest.mark.parametrize("target", ["silo-00.key", "accepted/silo-00.pub"])
def test_a_pipe_in_place_of_a_key_is_refused_and_not_waited_for(target: str, tmp_path: Path) -> None:
    init_keys(tmp_path, ["silo-00"])
    path = tmp_path / target
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(InputError, match="found 'a FIFO'"):
        _ = load_identity(tmp_path, "silo-00") if path.suffix == ".key" else load_accepted(tmp_path)


def test_keys_stay_accepted_while_their_folder_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_keys(tmp_path, ["silo-00", "silo-01"])
    accepted = load_accepted(tmp_path)
    before = set(accepted)
    listed = os.scandir

    def fail(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    (tmp_path / "accepted" / "silo-01.pub").unlink()
    monkeypatch.setattr(os, "scandir", fail)
    for _ in range(2):
        assert accepted.refresh() == []
        assert set(accepted) == before and os.strerror(errno.EMFILE) in accepted.problem
    monkeypatch.setattr(os, "scandir", listed)
    assert accepted.refresh() == ["silo-01"]
    assert set(accepted) == before - {"silo-01"} and not accepted.problem


# Keys that nobody holds

_P = 2**255 - 19
#: The y coordinate of two of the points of order 8; the other two have its negative.
_Y8 = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")
_SMALL_ORDER = [y | sign << 255 for y in (1, _P - 1, 0, _Y8, _P - _Y8) for sign in (0, 1)]
_NOT_CANONICAL = [y | sign << 255 for y in range(_P, 2**255) for sign in (0, 1)]


def test_a_key_that_nobody_holds_is_refused_wherever_it_is_read_and_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "accepted").mkdir()
    for number in (*_SMALL_ORDER, *_NOT_CANONICAL):
        raw = number.to_bytes(32, "little")
        with pytest.raises(ValueError, match=r"point|canonical"):
            public_key_of(raw)
        (tmp_path / "accepted" / "silo-00.pub").write_bytes(public_pem(Ed25519PublicKey.from_public_bytes(raw)))
        with pytest.raises(InputError):
            load_accepted(tmp_path)
    for _ in range(50):
        raw = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
        assert public_key_of(raw).public_bytes_raw() == raw


def test_a_request_for_a_key_that_nobody_holds_is_refused_though_its_signature_is_valid(tmp_path: Path) -> None:
    raw, order = (1).to_bytes(32, "little"), 2**252 + 27742317777372353535851937790883648493
    statement = statement_of("silo-00", raw.hex(), None)
    seed = bytes(31) + b"\1"
    scalar = bytearray(hashlib.sha512(seed).digest()[:32])
    scalar[0], scalar[31] = scalar[0] & 248, scalar[31] & 63 | 64
    point = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    signature = point + (int.from_bytes(scalar, "little") % order).to_bytes(32, "little")
    Ed25519PublicKey.from_public_bytes(raw).verify(signature, statement)  # without the private key
    request = {"key_request": 1, "name": "silo-00", "key": raw.hex(), "signature": signature.hex()}
    path = tmp_path / "silo-00.request"
    path.write_text(json.dumps(request))
    with pytest.raises(InputError, match="small order"):
        read_request(path)


def test_an_error_of_the_thread_that_admits_connections_reaches_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bool:
        raise ArithmeticError("base is not invertible")

    monkeypatch.setattr(ListenerKeys, "accepts", fails)
    peer, key = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    listener = listen("tcp://127.0.0.1:*", keys=ListenerKeys(key.public_key(), {}))
    connection = connect(listener.uri, keys=ConnectionKeys(peer, key.public_key(), "silo-00"))
    try:
        with pytest.raises(RunError, match="admission of connections failed"):
            while True:
                listener.receive(0.05)
    finally:
        connection.close()
        listener.close()
