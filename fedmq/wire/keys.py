"""Identities of processes: Ed25519 key files, created, loaded and revoked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from mnemonic import Mnemonic

from fedmq.errors import InputError
from fedmq.storage.run_folder import writing
from fedmq.wire.fields import NAME
from fedmq.wire.sealed_sessions import KEY_BYTES

_ACCEPTED = "accepted"
_REVOKED = "revoked"
#: Words of a fingerprint, 11 bits each.
_WORDS = 8


@dataclass(frozen=True)
class Identity:
    """A process's name and its private signing key."""

    name: str
    key: Ed25519PrivateKey


def init_keys(directory: Path, names: Iterable[str]) -> None:
    """Create a key pair per name: ``NAME.key`` (PKCS8 PEM, mode 0600) and ``accepted/NAME.pub`` (SPKI PEM).

    Nothing is written if any of the keys, private or public, already exists.

    Raises:
        InputError: a name is not allowed, is given twice, or already has a key; or the folder cannot be written.
        RunError: the disk is full or broken.
    """
    requested = list(names)
    for name in requested:
        _check_key_name(directory, name)
        for path in (directory / f"{name}.key", directory / _ACCEPTED / f"{name}.pub"):
            if path.exists():
                raise InputError(str(path), "an existing key", "a folder without that key")
    if len(set(requested)) != len(requested):
        raise InputError(str(directory), requested, "distinct names")
    written: list[Path] = []
    try:
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            (directory / _ACCEPTED).mkdir(exist_ok=True)
        for name in requested:
            key = Ed25519PrivateKey.generate()
            private, public = directory / f"{name}.key", directory / _ACCEPTED / f"{name}.pub"
            _write(private, _private_pem(key), 0o600)
            written.append(private)
            _write(public, _public_pem(key.public_key()), 0o644)
            written.append(public)
    except BaseException:
        for path in written:  # the next attempt would stop at an existing key
            path.unlink(missing_ok=True)
        raise


def load_identity(directory: Path, name: str) -> Identity:
    """Load a private key.

    Raises:
        InputError: the file is missing, readable by others, or not an Ed25519 private key in PKCS8 PEM.
    """
    _check_key_name(directory, name)
    path = directory / f"{name}.key"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            raw = file.read(4096)
    except OSError as error:
        raise InputError(str(path), error.strerror, "a readable key file") from error
    if mode & 0o077:
        raise InputError(str(path), f"mode {mode:04o}", f"mode 0600: run `chmod 600 {path}`")
    try:
        key = serialization.load_pem_private_key(raw, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(str(path), "a file that is not a private key", "an Ed25519 key in PKCS8 PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(str(path), type(key).__name__, "an Ed25519 key in PKCS8 PEM")
    return Identity(name, key)


def load_accepted(directory: Path) -> Mapping[str, Ed25519PublicKey]:
    """Load the accepted public keys, ``accepted/NAME.pub``, by name.

    Raises:
        InputError: the folder is missing, a file is not an Ed25519 public key, or two names share a key.
    """
    folder = directory / _ACCEPTED
    if not folder.is_dir():
        raise InputError(str(folder), "no such folder", "a folder of NAME.pub files, made by `fedmq keys init`")
    accepted: dict[str, Ed25519PublicKey] = {}
    holders: dict[bytes, str] = {}
    for path in sorted(folder.glob("*.pub")):
        name = path.stem
        _check_key_name(folder, name)
        try:
            key = serialization.load_pem_public_key(path.read_bytes())
        except OSError as error:
            raise InputError(str(path), error.strerror, "a readable key file") from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise InputError(str(path), "a file that is not a public key", "an Ed25519 public key in PEM") from error
        if not isinstance(key, Ed25519PublicKey):
            raise InputError(str(path), type(key).__name__, "an Ed25519 public key in PEM")
        holder = holders.setdefault(key.public_bytes_raw(), name)
        if holder != name:
            raise InputError(str(path), f"the same key as {holder}", "a different key for each name")
        accepted[name] = key
    return accepted


def revoke(directory: Path, name: str) -> None:
    """Revoke a name's key: move its public key to ``revoked/``, where the file name records its fingerprint.

    Raises:
        InputError: the name has no accepted key, or the folder cannot be written.
    """
    _check_key_name(directory, name)
    path = directory / _ACCEPTED / f"{name}.pub"
    if not path.is_file():
        raise InputError(str(path), "no such key", "the name of an accepted key")
    key = load_accepted(directory)[name]
    try:
        (directory / _REVOKED).mkdir(exist_ok=True)
        # With the fingerprint in the file name, several keys of a name can be revoked.
        path.replace(directory / _REVOKED / f"{name}-{fingerprint(key)[:16]}.pub")
    except OSError as error:
        raise InputError(str(error.filename or directory), error.strerror, "a folder that can be written") from error


def fingerprint(key: Ed25519PublicKey | Identity) -> str:
    """SHA-256 of the 32 raw bytes of a public key, in hexadecimal."""
    public = key.key.public_key() if isinstance(key, Identity) else key
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()


def words(key: Ed25519PublicKey | Identity) -> str:
    """The first 88 bits of a fingerprint as eight words of the BIP 39 list, to be compared over the telephone."""
    listed = Mnemonic("english").wordlist
    bits = int(fingerprint(key), 16) >> (256 - 11 * _WORDS)
    return " ".join(listed[bits >> 11 * place & 2047] for place in reversed(range(_WORDS)))


def noise_key(identity: Identity) -> bytes:
    """Derive a secret of 32 bytes from a private key, for the noise on a silo's updates (HKDF, RFC 5869)."""
    derivation = HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=b"fedmq noise of updates")
    return derivation.derive(identity.key.private_bytes_raw())


def _check_key_name(place: Path, name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise InputError(str(place), name, f"a name of the form {NAME.pattern}")


def _private_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public_pem(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _write(path: Path, raw: bytes, mode: int) -> None:
    """Create a file with ``mode`` from the start; a failed write leaves no file.

    Raises:
        InputError: it already exists, or its folder cannot be written.
        RunError: the disk is full or broken.
    """
    with writing(path):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            raise InputError(str(path), "an existing key", "a folder without that key") from None
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(raw)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
