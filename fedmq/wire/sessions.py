"""Identities and sessions: Ed25519 keys on disk, and the sealing and opening of envelopes.

The handshake that makes sessions is in fedmq.wire.handshake. Nothing here does I/O but the key functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedmq.errors import LocalWireError, RemoteWireError
from fedmq.wire.codec import (
    MAX_BODY,
    BytesLike,
    body_size,
    byte_view,
    decode,
    decode_header,
    encode_body,
    encode_header,
)
from fedmq.wire.messages import SESSION_BYTES, WIRE_VERSION, Header, Kind, Message, Reason

TAG_BYTES = 16
KEY_BYTES = 32
#: Messages one key may seal: far below AES-GCM's limits, far above any run's needs.
MAX_MESSAGES = 1 << 32
HANDSHAKE_KINDS = frozenset({Kind.HELLO, Kind.WELCOME, Kind.READY})

# update_into wants room for one block less a byte behind what it writes; the tag takes that room afterwards.
_SLACK = TAG_BYTES


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
        RemoteWireError: see :meth:`Session.open` and :func:`fedmq.wire.codec.decode`.
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
