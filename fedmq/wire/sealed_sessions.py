"""Sessions: sealing and opening of messages with AES-256-GCM. :mod:`fedmq.wire.handshake` creates them."""

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
#: Messages that one key may seal: far below AES-GCM's limits, far above the needs of any run.
MAX_MESSAGES = 1 << 32
HANDSHAKE_KINDS = frozenset({Kind.HELLO, Kind.WELCOME, Kind.READY, Kind.REJECT, Kind.INQUIRE})

# update_into needs a block less one byte of extra room after its output; the tag is written there afterwards.
_SLACK = TAG_BYTES


@dataclass(frozen=True)
class Sealed:
    """A sealed message.

    Args:
        header: as sent, with session and counter.
        frames: unencrypted header, sealed body.
        tag: the 16-byte GCM tag in hexadecimal, which identifies the message in the logs.
    """

    header: Header
    frames: tuple[BytesLike, ...]
    tag: str

    @property
    def size(self) -> int:
        """Size of all frames [bytes]."""
        return body_size(self.frames)


@dataclass(frozen=True)
class Opened:
    """An opened message: its header, its body as a read-only memoryview, its tag in hexadecimal."""

    header: Header
    body: memoryview
    tag: str


class Session:
    """One side's keys and counters of a connection; not thread-safe.

    Args:
        run: the run's name, the same on both sides.
        name: this side's name.
        peer: the other side's name.
        session: identifier, 16 bytes.
        send_key: 32 bytes, the peer's receive key.
        receive_key: 32 bytes, the peer's send key.
        wire_version: negotiated in the handshake.

    Raises:
        LocalWireError: the identifier or a key has the wrong length.
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
            raise LocalWireError("a session needs an identifier of 16 bytes and two keys of 32 bytes")
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
        """Expected counter of the peer's next message."""
        return self._next_received

    def seal(self, header: Header, buffers: Sequence[BytesLike]) -> Sealed:
        """Seal a body under the next counter and set the header's session, counter and wire version.

        Args:
            header: run, sender and receiver must be the session's.
            buffers: their concatenation is the body; each is passed to the cipher without a copy.

        Raises:
            LocalWireError: a header of another session, a body that is too large, or a key that has sealed
                :data:`MAX_MESSAGES` messages.
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
        # Incremented before the key is used, so that no failure below can lead to a repeated nonce.
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
        """Open the peer's next message. A refused one leaves the session unchanged, except that a gap is skipped.

        Args:
            frames: unencrypted header, sealed body.
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
        # A gap, shown by an authentic message only, costs that message but not the session: the lost messages stay
        # lost, no message is accepted out of order, and the next one is in order again.
        self._next_received = header.counter + 1
        if header.counter != expected:
            raise RemoteWireError(Reason.GAP, f"message {header.counter} of {self.peer}, expected {expected}")
        return Opened(header, body.toreadonly(), bytes(sealed[size:]).hex())

    def _check(self, header: Header) -> None:
        """Refuse a header that cannot be this session's next, before decrypting."""
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


def sealed_size(session: Session, message: Message) -> int:
    """Size of all frames that :func:`seal_message` would make of a message [bytes]."""
    header = replace(message.header, session=session.session, counter=session.sent, wire_version=session.wire_version)
    return len(encode_header(header)) + body_size(encode_body(message, session.wire_version)) + TAG_BYTES


def seal_message(session: Session, message: Message) -> Sealed:
    """Encode and seal a message.

    Raises:
        LocalWireError: see :meth:`Session.seal`; or the message is of a handshake kind.
    """
    if message.header.kind in HANDSHAKE_KINDS:
        raise LocalWireError(f"a message of kind {message.header.kind} belongs to the handshake")
    return session.seal(message.header, encode_body(message, session.wire_version))


def open_message(session: Session, frames: Sequence[BytesLike], *, max_body: int = MAX_BODY) -> tuple[Message, str]:
    """Open and decode a message.

    Returns:
        The message, whose arrays are read-only views of the opened body, and its tag in hexadecimal.

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
    """12 bytes: four zeros, then the counter, big endian. Each direction has its own key, so no nonce repeats."""
    return counter.to_bytes(12, "big")
