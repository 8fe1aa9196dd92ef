"""Identities and sessions: Ed25519 keys on disk, and the sealing and opening of envelopes.

The handshake that makes sessions is in fedmq.handshake. Nothing here does I/O but the key functions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmq.codec import MAX_BODY, BytesLike, body_size, byte_view, decode, decode_header, encode_body, encode_header
from fedmq.errors import InputError, LocalWireError, RemoteWireError
from fedmq.fields import NAME
from fedmq.messages import SESSION_BYTES, WIRE_VERSION, Header, Kind, Message, Reason
from fedmq.runfolder import writing

TAG_BYTES = 16
KEY_BYTES = 32
#: Messages one key may seal: far below AES-GCM's limits, far above any run's needs.
MAX_MESSAGES = 1 << 32
HANDSHAKE_KINDS = frozenset({Kind.HELLO, Kind.WELCOME, Kind.READY})

# update_into wants room for one block less a byte behind what it writes; the tag takes that room afterwards.
_SLACK = TAG_BYTES
_ACCEPTED = "accepted"
_REVOKED = "revoked"


@dataclass(frozen=True)
class Identity:
    """A process's name and its private signing key."""

    name: str
    key: Ed25519PrivateKey


def init_keys(directory: Path, names: Iterable[str]) -> None:
    """Make a key pair per name: ``NAME.key`` (PKCS8 PEM, mode 0600) and ``accepted/NAME.pub`` (SPKI PEM).

    Nothing is written if any of the keys, private or public, already exists.

    Raises:
        InputError: a name is not allowed, comes twice, or has a key already; or the folder cannot be written.
        RunError: the disk is full or broken.
    """
    wanted = list(names)
    for name in wanted:
        _check_key_name(directory, name)
        for path in (directory / f"{name}.key", directory / _ACCEPTED / f"{name}.pub"):
            if path.exists():
                raise InputError(str(path), "an existing key", "a folder without that key")
    if len(set(wanted)) != len(wanted):
        raise InputError(str(directory), wanted, "names that differ")
    made: list[Path] = []
    try:
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            (directory / _ACCEPTED).mkdir(exist_ok=True)
        for name in wanted:
            key = Ed25519PrivateKey.generate()
            private, public = directory / f"{name}.key", directory / _ACCEPTED / f"{name}.pub"
            _write(private, _private_pem(key), 0o600)
            made.append(private)
            _write(public, _public_pem(key.public_key()), 0o644)
            made.append(public)
    except BaseException:
        for path in made:  # half of them would stop the next try
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
        raise InputError(str(path), f"mode {mode:04o}", "mode 0600: a private key is its owner's alone")
    try:
        key = serialization.load_pem_private_key(raw, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(str(path), "a file that is no private key", "an Ed25519 key in PKCS8 PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(str(path), type(key).__name__, "an Ed25519 key in PKCS8 PEM")
    return Identity(name, key)


def load_accepted(directory: Path) -> Mapping[str, Ed25519PublicKey]:
    """Load the public keys that are accepted: every ``accepted/NAME.pub``.

    Raises:
        InputError: the folder is missing, a file is not an Ed25519 public key, or two names share one key.
    """
    folder = directory / _ACCEPTED
    if not folder.is_dir():
        raise InputError(str(folder), "no such folder", "a folder of NAME.pub files, as `fedmq keys init` makes it")
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
            raise InputError(str(path), "a file that is no public key", "an Ed25519 public key in PEM") from error
        if not isinstance(key, Ed25519PublicKey):
            raise InputError(str(path), type(key).__name__, "an Ed25519 public key in PEM")
        holder = holders.setdefault(key.public_bytes_raw(), name)
        if holder != name:
            raise InputError(str(path), f"the same key as {holder}", "a key of its own per name")
        accepted[name] = key
    return accepted


def revoke(directory: Path, name: str) -> None:
    """Accept a name's key no longer: its public key moves to ``revoked/`` and its fingerprint stays on record.

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
        # The fingerprint is part of the name: a name may be given a new key and lose that one too.
        path.replace(directory / _REVOKED / f"{name}-{fingerprint(key)[:16]}.pub")
    except OSError as error:
        raise InputError(str(error.filename or directory), error.strerror, "a folder that can be written") from error


def fingerprint(key: Ed25519PublicKey | Identity) -> str:
    """SHA-256 of the 32 raw bytes of a public key, in hexadecimal."""
    public = key.key.public_key() if isinstance(key, Identity) else key
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()


def noise_key(identity: Identity) -> bytes:
    """32 bytes that only the holder of a private key can derive, for the noise on what it sends (HKDF, RFC 5869)."""
    derivation = HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=b"fedmq noise of updates")
    return derivation.derive(identity.key.private_bytes_raw())


@dataclass(frozen=True)
class Sealed:
    """A sealed envelope.

    Args:
        header: as sent, with session and counter.
        frames: clear header, sealed body.
        tag: the 16-byte GCM tag in hexadecimal: the message's digest in the logs.
    """

    header: Header
    frames: tuple[BytesLike, ...]
    tag: str

    @property
    def size(self) -> int:
        """Bytes of all frames."""
        return body_size(self.frames)


@dataclass(frozen=True)
class Opened:
    """An opened envelope: its header, its body as a read-only memoryview, its tag in hexadecimal."""

    header: Header
    body: memoryview
    tag: str


class Session:
    """One connection's keys and counters, for one of its two sides; one thread at a time.

    Args:
        run: the run both sides agreed on.
        name: this side's name.
        peer: the other side's name.
        session: 16 bytes that name the session.
        send_key: 32 bytes; the peer's receive key.
        receive_key: 32 bytes.
        wire_version: what the handshake agreed on.
    """

    def __init__(
        self,
        *,
        run: str,
        name: str,
        peer: str,
        session: bytes,
        send_key: bytes,
        receive_key: bytes,
        wire_version: int = WIRE_VERSION,
    ) -> None:
        if len(session) != SESSION_BYTES or len(send_key) != KEY_BYTES or len(receive_key) != KEY_BYTES:
            raise LocalWireError("a session needs 16 bytes of name and two keys of 32 bytes")
        self.run = run
        self.name = name
        self.peer = peer
        self.session = session
        self.wire_version = wire_version
        self._send_key = algorithms.AES(send_key)
        self._receive = AESGCM(receive_key)
        self._next_sent = 0
        self._next_received = 0

    @property
    def sent(self) -> int:
        """Messages sealed so far."""
        return self._next_sent

    @property
    def received(self) -> int:
        """Counter the next message of the peer must have."""
        return self._next_received

    def seal(self, header: Header, buffers: Sequence[BytesLike]) -> Sealed:
        """Seal a body under the next counter; the header's session and counter are filled in here.

        Args:
            header: run, sender and receiver must be the session's.
            buffers: their concatenation is the body; each is read once, straight into the cipher.

        Raises:
            LocalWireError: a foreign header, a body above the largest, or a key that has sealed all it may.
        """
        if (header.run, header.sender, header.receiver) != (self.run, self.name, self.peer):
            raise LocalWireError(
                f"a header {header.sender} -> {header.receiver} in a session {self.name} -> {self.peer}"
            )
        if self._next_sent >= MAX_MESSAGES:
            raise LocalWireError(f"this session's key has sealed {MAX_MESSAGES} messages")
        size = body_size(buffers)
        if size > MAX_BODY:
            raise LocalWireError(f"the body has {size} bytes, allowed {MAX_BODY}")
        header = replace(header, session=self.session, counter=self._next_sent, wire_version=self.wire_version)
        clear = encode_header(header)
        # The counter is spent before the key is used: whatever fails below, no nonce ever serves twice.
        self._next_sent += 1
        cipher = Cipher(self._send_key, modes.GCM(_nonce(header.counter))).encryptor()
        cipher.authenticate_additional_data(clear)
        sealed = np.empty(size + _SLACK, np.uint8).data
        end = 0
        for buffer in buffers:
            end += cipher.update_into(buffer, sealed[end:])
        cipher.finalize()
        sealed[end:] = cipher.tag
        return Sealed(header, (clear, sealed), cipher.tag.hex())

    def open(self, frames: Sequence[BytesLike], *, max_body: int = MAX_BODY) -> Opened:
        """Open the peer's next envelope. A refused one changes nothing, except that a gap is stepped over.

        Args:
            frames: clear header, sealed body.
            max_body: largest body accepted [bytes].

        Raises:
            RemoteWireError: ``malformed``, ``oversized``, ``wire_version``, ``wrong_run``, ``unknown_session``,
                ``unknown_sender``, ``wrong_receiver``, ``exhausted``, ``replay``, ``tampered`` or ``gap``.
        """
        clear, sealed = _two(frames)
        header = decode_header(clear)
        size = sealed.nbytes - TAG_BYTES
        if size < 0:
            raise RemoteWireError(Reason.MALFORMED, "the sealed body is shorter than its tag")
        if size > max_body:
            raise RemoteWireError(Reason.OVERSIZED, f"a body of {size} bytes, allowed {max_body}")
        self._check(header)
        body = np.empty(size, np.uint8).data
        try:
            self._receive.decrypt_into(_nonce(header.counter), sealed, bytes(clear), body)
        except InvalidTag:
            raise RemoteWireError(
                Reason.TAMPERED, f"message {header.counter} of {self.peer} is not as sealed"
            ) from None
        expected = self._next_received
        # Stepping over a gap (only once the message proved authentic) costs the message that shows the gap, not the
        # session: what was lost stays lost, nothing is ever accepted out of order, and the next message is in order.
        self._next_received = header.counter + 1
        if header.counter != expected:
            raise RemoteWireError(Reason.GAP, f"message {header.counter} of {self.peer}, expected {expected}")
        return Opened(header, body.toreadonly(), bytes(sealed[size:]).hex())

    def _check(self, header: Header) -> None:
        """Refuse a header that is not this session's next, before any cipher runs."""
        if header.wire_version != self.wire_version:
            detail = f"wire version {header.wire_version}, agreed on {self.wire_version}"
            raise RemoteWireError(Reason.WIRE_VERSION, detail)
        if header.run != self.run:
            raise RemoteWireError(Reason.WRONG_RUN, f"run {header.run}, here {self.run}")
        if header.session != self.session:
            raise RemoteWireError(Reason.UNKNOWN_SESSION, f"session {header.session.hex()}, here {self.session.hex()}")
        if header.sender != self.peer:
            raise RemoteWireError(Reason.UNKNOWN_SENDER, f"sender {header.sender} in a session with {self.peer}")
        if header.receiver != self.name:
            raise RemoteWireError(Reason.WRONG_RECEIVER, f"receiver {header.receiver}, here {self.name}")
        if header.counter >= MAX_MESSAGES:
            raise RemoteWireError(Reason.EXHAUSTED, f"counter {header.counter}, allowed below {MAX_MESSAGES}")
        if header.counter < self._next_received:
            raise RemoteWireError(Reason.REPLAY, f"message {header.counter}, expected {self._next_received}")


def seal_message(session: Session, message: Message) -> Sealed:
    """Encode and seal a message.

    Raises:
        LocalWireError: see :meth:`Session.seal`; or a handshake kind, which only the handshake makes.
    """
    if message.header.kind in HANDSHAKE_KINDS:
        raise LocalWireError(f"a message of kind {message.header.kind} belongs to the handshake")
    return session.seal(message.header, encode_body(message))


def open_message(session: Session, frames: Sequence[BytesLike], *, max_body: int = MAX_BODY) -> tuple[Message, str]:
    """Open and decode a message.

    Returns:
        The message, its arrays read-only views on the opened body, and its tag in hexadecimal.

    Raises:
        RemoteWireError: see :meth:`Session.open` and :func:`fedmq.codec.decode`.
    """
    opened = session.open(frames, max_body=max_body)
    if opened.header.kind in HANDSHAKE_KINDS:
        raise RemoteWireError(Reason.UNEXPECTED, f"a {opened.header.kind} after the handshake")
    return decode(opened.header, opened.body, max_body=max_body), opened.tag


def _two(frames: Sequence[BytesLike]) -> tuple[memoryview, memoryview]:
    if len(frames) != 2:
        raise RemoteWireError(Reason.MALFORMED, f"{len(frames)} frames, expected 2")
    return byte_view(frames[0]), byte_view(frames[1])


def _nonce(counter: int) -> bytes:
    """12 bytes: four zeros, then the counter, big endian. Each direction has a key of its own, so none repeats."""
    return counter.to_bytes(12, "big")


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
    """Write a new file that has its mode from its first byte on, whole or not at all.

    Raises:
        InputError: it is there already, or its folder cannot be written.
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
