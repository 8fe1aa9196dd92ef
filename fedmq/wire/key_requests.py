"""Requests to accept a key: what a site sends to the coordinator's operator, and the other way round; rosters.

A request is a public file. Its signature shows that its maker holds the private key. The operators check that the key
belongs to the site, by comparing the words of the fingerprint over the telephone. A request that replaces an accepted
key is also signed with that key. A roster is one file with the requests of all processes of a run, signed by the
process that made it, with words of its own: sites that compare them once accept each other's keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field

from fedmq.errors import InputError
from fedmq.storage.json_files import Digest, Stored, read_json
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import write_json
from fedmq.wire.fields import NAME
from fedmq.wire.keys import (
    Identity,
    is_encrypted,
    load_accepted,
    load_identity,
    new_key,
    private_names,
    public_key_of,
    words,
    words_of,
)

_ALLOWED = "a request made by `fedmq keys new`"
_MOST_BYTES = 1 << 20
_Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class KeyRequest(Stored):
    """A request to accept a key."""

    key_request: Literal[1]  # version of this format
    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]  # name of the process
    key: Digest  # its public key, Ed25519, 32 bytes in hexadecimal
    replaces: Digest | None = None  # the public key that this one replaces; None for a first key
    signature: _Signature  # signature of statement by the new key, 64 bytes in hexadecimal
    replaced_signature: _Signature | None = None  # signature of statement by the replaced key

    @property
    def public_key(self) -> Ed25519PublicKey:
        """The key to be accepted."""
        return public_key_of(bytes.fromhex(self.key))


class KeyRoster(Stored):
    """The requests of all processes of a run."""

    key_roster: Literal[1]  # version of this format
    requests: Annotated[list[KeyRequest], Field(min_length=2, max_length=1026)]  # one of each process, by name
    signer: str  # name of the process that made the roster, whose request is among them
    signature: _Signature  # Ed25519 of statement, by its key

    @property
    def statement(self) -> bytes:
        """The bytes that the signer signs: who has which key."""
        pairs = "".join(f"{request.name} {request.key}\n" for request in self.requests)
        return f"fedmq key roster 1\n{self.signer}\n{pairs}".encode()

    @property
    def words(self) -> str:
        """Twelve words of the names and keys, the same for everyone who has this roster.

        Whoever makes up keys can search for two rosters with the same words, so the 88 bits of eight words are too few.
        """
        return words_of(hashlib.sha256(self.statement).hexdigest(), 12)


def statement_of(name: str, key: str, replaces: str | None) -> bytes:
    """The bytes that a request signs; arguments as the fields of :class:`KeyRequest`."""
    return f"fedmq key request 1\n{name}\n{key}\n{replaces or ''}\n".encode()


class Acceptance(Enum):
    """What accepting a request does."""

    NEW = "new"
    REPLACES = "replaces"
    KNOWN = "known"


def new_request(
    directory: Path, name: str, passphrase: bytes | None = None, *, replace: bool = False
) -> tuple[Path, KeyRequest]:
    """Create a private key and the request to accept it, ``NAME.request``; returns that file and its content.

    Args:
        directory: folder of keys; created if missing.
        name: name of the process.
        passphrase: encrypts the private key.
        replace: replaces the present key, which signs the request.

    Raises:
        InputError: the name is not allowed, has a key (or none to replace), or the folder cannot be written.
        RunError: the disk is full or broken.
    """
    former = load_identity(directory, name) if replace else None
    identity = new_key(directory, name, passphrase, replace=replace)
    key, replaces = _hex(identity), None if former is None else _hex(former)
    statement = statement_of(name, key, replaces)
    request = KeyRequest(
        key_request=1,
        name=name,
        key=key,
        replaces=replaces,
        signature=identity.key.sign(statement).hex(),
        replaced_signature=None if former is None else former.key.sign(statement).hex(),
    )
    path = directory / f"{name}.request"
    write_json(path, request.plain())
    return path, request


def _hex(identity: Identity) -> str:
    return identity.key.public_key().public_bytes_raw().hex()


def read_request(path: Path) -> KeyRequest:
    """Read a request and verify its signatures.

    Raises:
        InputError: the file is not a request, or a signature is wrong.
    """
    request = read_json(path, KeyRequest, _ALLOWED)
    _verify(path, request)
    return request


def _verify(path: Path, request: KeyRequest) -> None:
    """Verify the signatures of a request; raises as :func:`read_request`."""
    statement = statement_of(request.name, request.key, request.replaces)
    signed = [(request.key, request.signature)]
    if request.replaces is not None:
        signed.append((request.replaces, request.replaced_signature or "0" * 128))
    for key, signature in signed:
        try:
            public_key_of(bytes.fromhex(key)).verify(bytes.fromhex(signature), statement)
        except InvalidSignature:
            raise InputError(str(path), "a wrong signature", f"{_ALLOWED}, unchanged") from None
        except ValueError as error:
            raise InputError(str(path), str(error), _ALLOWED) from None


_ROSTER = "a roster made by `fedmq keys roster`"


def make_roster(file: Path, directory: Path, signer: str, requests: Sequence[Path]) -> KeyRoster:
    """Write a roster of requests and of the signer's own one.

    Raises:
        InputError: a request is invalid, or two are of the same name.
    """
    identity = load_identity(directory, signer)
    own = directory / f"{signer}.request"
    paths = {own, *requests}
    found = {request.name: request for request in map(read_request, paths)}
    if len(found) != len(paths):
        raise InputError(str(file), "two requests of one name", "one request of each process")
    if found[signer].key != _hex(identity):
        raise InputError(str(own), "a request of another key", "that of the present key")
    ordered = [found[name] for name in sorted(found)]
    unsigned = KeyRoster(key_roster=1, requests=ordered, signer=signer, signature="0" * 128)
    roster = unsigned.model_copy(update={"signature": identity.key.sign(unsigned.statement).hex()})
    write_json(file, roster.plain())
    return roster


def read_roster(path: Path, directory: Path) -> KeyRoster:
    """Read a roster, and verify its signatures and that it lists this folder's own keys.

    Raises:
        InputError: it is not a roster, a signature is wrong, or it lists another key, or none, for a process of the
            folder.
    """
    roster = read_json(path, KeyRoster, _ROSTER)
    for request in roster.requests:
        _verify(path, request)
    keys = {request.name: request.public_key for request in roster.requests}
    if len(keys) != len(roster.requests) or roster.signer not in keys:
        raise InputError(str(path), "two keys of one name, or none of its signer", _ROSTER)
    try:
        keys[roster.signer].verify(bytes.fromhex(roster.signature), roster.statement)
    except InvalidSignature:
        raise InputError(str(path), "a wrong signature", f"{_ROSTER}, unchanged") from None
    own = private_names(directory)
    if not own:
        raise InputError(str(directory), "no private key", "the folder of this site, whose key the roster has")
    for name in own:
        found = keys.get(name)
        if found is None or found.public_bytes_raw() != _own_key(directory, name):
            raise InputError(str(path), f"another key of {name} than in {directory}, or none", "a roster with that key")
    return roster


def _own_key(directory: Path, name: str) -> bytes | None:
    """The public half of a private key of the folder; of an encrypted one from its request, if that is there."""
    key = known_keys(directory).get(name)
    return None if key is None else key.public_bytes_raw()


def is_roster(path: Path) -> bool:
    """Whether a file looks like a roster, and not like a request."""
    try:
        return b'"key_roster"' in read_regular(path, _ROSTER, _MOST_BYTES)
    except InputError:
        return False


def acceptance_of(directory: Path, path: Path, request: KeyRequest) -> Acceptance:
    """What accepting a request would do; nothing is changed.

    Raises:
        InputError: another key is accepted for that name and has not signed the request.
    """
    present = load_accepted(directory).get(request.name) if (directory / "accepted").is_dir() else None
    if present is None:
        return Acceptance.NEW
    accepted = present.public_bytes_raw().hex()
    if accepted == request.key:
        return Acceptance.KNOWN
    if accepted == request.replaces:
        return Acceptance.REPLACES
    found = f"a key for {request.name}, for which another key is accepted ({words(present)})"
    allowed = f"a request signed by that key (`fedmq keys new {request.name} --replace`), or remove that key first"
    raise InputError(str(path), found, f"{allowed}: `fedmq keys remove {request.name} --keys {directory}`")


def known_keys(directory: Path) -> Mapping[str, Ed25519PublicKey]:
    """The public keys that a folder shows, by name: the accepted ones, and those of its own private keys.

    No passphrase is asked for: the public half of an encrypted key is read from the request that was made with it.

    Raises:
        InputError: a file of the folder is not what it should be.
    """
    keys = dict(load_accepted(directory)) if (directory / "accepted").is_dir() else {}
    for name in private_names(directory):
        request = directory / f"{name}.request"
        if name in keys:
            continue
        if not is_encrypted(directory, name):
            keys[name] = load_identity(directory, name).key.public_key()
        elif request.is_file() and (found := read_request(request)).name == name:
            keys[name] = found.public_key
    if not keys:
        raise InputError(str(directory), "no keys", "a folder of accepted keys, made by `fedmq keys`")
    return keys
