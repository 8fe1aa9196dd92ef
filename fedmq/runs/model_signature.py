"""Sign the folder of a released model, and verify it: who released these files, and were they changed since?

``signature.json`` has the SHA-256 of every file of the folder and an Ed25519 signature over them. Encoded galleries
(``gallery/``) are not part of a release and are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field

from fedmq.errors import InputError
from fedmq.storage.json_files import Digest, Stored, read_json
from fedmq.storage.regular_files import open_regular
from fedmq.storage.run_folder import write_json
from fedmq.wire.keys import Identity, public_key_of

SIGNATURE: Final = "signature.json"
_GALLERY = "gallery"
_DOMAIN = b"fedmq model folder 1\n"  # so that no other signature of the key can be mistaken for this one
_ALLOWED = "the signature of a model's folder, made by fedmq sign"
_MAX_FILES = 1000
_BLOCK = 1 << 20


class Signature(Stored):
    """``signature.json``.

    Args:
        format: format of the file.
        signer: name of the key.
        key: public Ed25519 key (hex).
        files: SHA-256 (hex) of each file, by its path in the folder.
        signature: Ed25519 signature (hex).
    """

    format: Literal[1]
    signer: Annotated[str, Field(min_length=1, max_length=64)]
    key: Digest
    files: Annotated[dict[str, Digest], Field(max_length=_MAX_FILES)]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


@dataclass(frozen=True)
class Verified:
    """What a verification found.

    Args:
        signer: name of the key, as the signature states it.
        key: the public key that signed.
        files: number of signed files.
        differences: a line for each file that differs; empty if the folder is as it was signed.
    """

    signer: str
    key: Ed25519PublicKey
    files: int
    differences: tuple[str, ...]


def sign_model(folder: Path, identity: Identity) -> Signature:
    """Sign a model's folder and write ``signature.json`` into it; an older signature is replaced.

    Args:
        folder: with ``config.json`` and ``model.safetensors``.
        identity: name and private key of the signer.

    Raises:
        InputError: it is not a model's folder, or holds something other than regular files.
    """
    files = _digests(folder)
    for name in ("config.json", "model.safetensors"):
        if name not in files:
            raise InputError(str(folder), f"no {name} in it", "the folder of a released model")
    made = Signature(
        format=1,
        signer=identity.name,
        key=identity.key.public_key().public_bytes_raw().hex(),
        files=files,
        signature=identity.key.sign(_signed(identity.name, files)).hex(),
    )
    write_json(folder / SIGNATURE, made.plain())
    return made


def verify_model(folder: Path) -> Verified:
    """Compare a model's folder with its signature.

    The result says which key signed; whether that key is trusted is for the caller to decide.

    Raises:
        InputError: there is no signature, it is malformed or of other content, or the folder holds something other than
            regular files.
    """
    path = folder / SIGNATURE
    if not path.is_file():
        raise InputError(str(folder), f"no {SIGNATURE} in it", "the folder of a model signed by fedmq sign")
    made = read_json(path, Signature, _ALLOWED)
    for name in made.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise InputError(f"{path}: files", name, "paths within the folder")
    try:
        key = public_key_of(bytes.fromhex(made.key))
        key.verify(bytes.fromhex(made.signature), _signed(made.signer, made.files))
    except (InvalidSignature, ValueError):
        raise InputError(str(path), "a signature that does not fit its list of files", _ALLOWED) from None
    found = _digests(folder)
    differences = []
    for name in sorted(made.files.keys() | found.keys()):
        if name not in found:
            differences.append(f"{name}: missing")
        elif name not in made.files:
            differences.append(f"{name}: not signed")
        elif found[name] != made.files[name]:
            differences.append(f"{name}: changed since it was signed")
    return Verified(made.signer, key, len(made.files), tuple(differences))


def _signed(signer: str, files: Mapping[str, str]) -> bytes:
    """The bytes under the signature."""
    return _DOMAIN + json.dumps({"signer": signer, "files": dict(files)}, sort_keys=True).encode()


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 (hex) of each file of a folder, by its path in it.

    Raises:
        InputError: it is not a folder, has too many files, or a link, pipe or device in it.
    """
    if not folder.is_dir():
        raise InputError(str(folder), "no such folder", "the folder of a released model")
    found: dict[str, str] = {}
    for here, folders, names in os.walk(folder):
        if Path(here) == folder:
            folders[:] = [name for name in folders if name != _GALLERY]
            names = [name for name in names if name != SIGNATURE]  # noqa: PLW2901
        for name in (*names, *(each for each in folders if (Path(here) / each).is_symlink())):
            path = Path(here) / name
            if path.is_symlink():
                raise InputError(str(path), "a link", "regular files only")
            if len(found) == _MAX_FILES:
                raise InputError(str(folder), f"more than {_MAX_FILES} files", "the folder of a released model")
            hashed = hashlib.sha256()
            with open_regular(path, "a file of a released model") as file:
                while block := file.read(_BLOCK):
                    hashed.update(block)
            found[path.relative_to(folder).as_posix()] = hashed.hexdigest()
    return dict(sorted(found.items()))
