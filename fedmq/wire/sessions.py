"""Sessions: sealing and opening of messages with AES-256-GCM. :mod:`fedmq.wire.handshake` creates them.

A session may seal the header in front of the body and pad both: an observer of the network then sees neither names nor
kinds, and only rounded-up sizes. The clear header is short (wire version, session, counter), and what is sealed is:

    length of the header (4 bytes, little endian), length of the body (8 bytes), the header,
    zeros up to a multiple of 16, the body, zeros as padding

A model that goes to many peers is sealed once, under a key of its own, as the third frame of each of their messages.
The session seals that key with the rest of the message, and the digest by which a receiver knows that no other
receiver, who has the key, too, put another model in its place.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedmq.config.sections import Wire
from fedmq.errors import LocalWireError, RemoteWireError
from fedmq.profiling import span
from fedmq.wire.codec import (
    ALIGNMENT,
    MAX_BODY,
    MAX_HEADER,
    BytesLike,
    body_size,
    byte_view,
    decode,
    decode_clear,
    decode_header,
    digest,
    encode_around,
    encode_body,
    encode_header,
    encode_short_header,
    encode_tensors,
    fresh_memory,
    unknown_version,
)
from fedmq.wire.messages import SESSION_BYTES, WIRE_VERSION, Header, Kind, Message, Reason, ShortHeader
from fedmq.wire.payloads import Payload

TAG_BYTES = 16
KEY_BYTES = 32
#: Messages that one key may seal: far below AES-GCM's limits, far above the needs of any run.
MAX_MESSAGES = 1 << 32
HANDSHAKE_KINDS = frozenset({Kind.HELLO, Kind.WELCOME, Kind.READY, Kind.REJECT, Kind.INQUIRE})
#: Messages with which the two ends of a session agree on new keys; see :mod:`fedmq.wire.key_agreement`.
REKEY_KINDS = frozenset({Kind.REKEY, Kind.REKEYED})

_LENGTHS = 12
#: Maximum number of bytes that the sealed header adds to a body.
MAX_PREFIX = _LENGTHS + MAX_HEADER + ALIGNMENT
#: Minimum size to which messages are padded [bytes].
LEAST_PADDED = 4096
#: Steps between a power of two and the next.
_STEPS = 4

#: Size of a model from which it is sealed once for all peers [bytes].
LEAST_SHARED = 1 << 20
#: Precedes the rest of a body whose shared part is in a frame of its own: where in the body that part begins [bytes],
#: which of the payloads it is, its key, the payload's digest.
_SHARED = struct.Struct(">QQ32s32s")

#: What a session hides by default.
_NOTHING_HIDDEN = Wire()

# update_into needs a block less one byte of extra room after its output; the tag is written there afterwards.
_SLACK = TAG_BYTES


@dataclass(frozen=True)
class Sealed:
    """A sealed message."""

    header: Header  # header as sent, with session and counter
    frames: tuple[BytesLike, ...]  # unencrypted header, sealed body, and the body's shared part if it has one
    tag: str  # the 16-byte GCM tag in hexadecimal, which identifies the message in the logs

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
    shared: tuple[int, str] | None = None  # of a body with a shared part: number and digest of the payload that it is


@dataclass(frozen=True)
class SharedPart:
    """A payload's tensors, sealed once for all peers that they are sent to."""

    payload: Payload
    key: bytes  # 32 bytes, which seal nothing else
    sealed: memoryview  # ciphertext and tag


@span("seal")
def seal_shared(payload: Payload, room: Callable[[int], memoryview] = fresh_memory) -> SharedPart:
    """Seal a payload's tensors for all peers; ``room`` allocates memory of a size [bytes]."""
    buffers, key = encode_tensors(payload), os.urandom(KEY_BYTES)
    sealed, _ = _seal(algorithms.AES(key), bytes(12), b"", buffers, room)
    return SharedPart(payload, key, sealed)


def _seal(
    key: algorithms.AES, nonce: bytes, clear: bytes, buffers: Sequence[BytesLike], room: Callable[[int], memoryview]
) -> tuple[memoryview, bytes]:
    """The ciphertext of buffers with its tag behind it, and the tag; each buffer goes to the cipher without a copy."""
    cipher = Cipher(key, modes.GCM(nonce)).encryptor()
    cipher.authenticate_additional_data(clear)
    sealed = room(body_size(buffers) + _SLACK)
    end = 0
    for buffer in buffers:
        end += cipher.update_into(buffer, sealed[end:])
    cipher.finalize()
    sealed[end:] = cipher.tag
    return sealed, cipher.tag


@dataclass
class _Receiving:
    """The key of the peer's messages, under the session identifier that they carry."""

    session: bytes  # identifier, 16 bytes
    cipher: AESGCM
    next: int = 0  # expected counter of the next message


class SessionKeys(TypedDict):
    """One side's keys of a session."""

    session: bytes  # identifier, 16 bytes, which the header of each message names
    send_key: bytes  # 32 bytes, the peer's receive key
    receive_key: bytes  # 32 bytes, the peer's send key


class Session:
    """One side's keys and counters of a connection; not thread-safe.

    Attributes:
        size: bytes sealed and opened under the present keys.

    Raises:
        LocalWireError: the identifier or a key has the wrong length.
    """

    def __init__(
        self,
        *,
        run: str,  # the run's name, the same on both sides
        name: str,  # this side's name
        peer: str,  # the other side's name
        options: Wire = _NOTHING_HIDDEN,  # what of its messages this side hides
        **keys: Unpack[SessionKeys],
    ) -> None:
        self.run, self.name, self.peer = run, name, peer
        self._hides, self._pads = options.hides, options.padding
        self.authentic = 0  # number of the peer's messages whose tag was right
        self._receiving = self._use(**keys)
        self._coming: _Receiving | None = None

    def _use(self, session: bytes, send_key: bytes, receive_key: bytes) -> _Receiving:
        """Use keys for sending; returns what opens the peer's messages under them."""
        if len(session) != SESSION_BYTES or len(send_key) != KEY_BYTES or len(receive_key) != KEY_BYTES:
            raise LocalWireError("a session needs an identifier of 16 bytes and two keys of 32 bytes")
        self.session, self._send_key, self._next_sent = session, algorithms.AES(send_key), 0
        self.size = 0
        return _Receiving(session, AESGCM(receive_key))

    def rekey(self, keys: SessionKeys) -> None:
        """Use new keys for sending; the peer's messages may have the old ones until the first with the new ones."""
        self._coming = self._use(**keys)

    @property
    def sent(self) -> int:
        """Messages sealed under the present keys."""
        return self._next_sent

    @property
    def received(self) -> int:
        """Expected counter of the peer's next message under the keys that it used last."""
        return self._receiving.next

    @span("seal")
    def seal(
        self,
        header: Header,
        buffers: Sequence[BytesLike],
        room: Callable[[int], memoryview] = fresh_memory,
        shared: memoryview | None = None,
    ) -> Sealed:
        """Seal a body under the next counter and set the header's session and counter.

        Args:
            header: run, sender and receiver must be the session's.
            buffers: their concatenation is the body; each is passed to the cipher without a copy.
            room: allocates memory of a size [bytes] for the sealed body.
            shared: the body's sealed shared part, which travels in a frame of its own.

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
        apart = () if shared is None else (shared,)
        size = body_size([*buffers, *apart])
        if size > MAX_BODY:
            raise LocalWireError(f"the body has {size} bytes, allowed {MAX_BODY}")
        header = replace(header, session=self.session, counter=self._next_sent, wire_version=WIRE_VERSION)
        clear, buffers = self._frames(header, buffers)
        # Incremented before the key is used, so that no failure below can lead to a repeated nonce.
        self._next_sent += 1
        sealed, tag = _seal(self._send_key, _nonce(header.counter, len(apart)), clear, buffers, room)
        self.size += body_size([sealed, *apart]) - TAG_BYTES
        return Sealed(header, (clear, sealed, *apart), tag.hex())

    def _frames(self, header: Header, buffers: Sequence[BytesLike]) -> tuple[bytes, Sequence[BytesLike]]:
        """The clear header, and what is sealed."""
        if not self._hides or header.kind in HANDSHAKE_KINDS:
            return encode_header(header), buffers
        content = [prefix_of(encode_header(header), body_size(buffers)), *buffers]
        size = body_size(content)
        return encode_short_header(header), [*content, bytes(padded_size(size) - size)] if self._pads else content

    def sealed_size(self, message: Message) -> int:
        """Size of all frames that :func:`seal_message` would make of a message [bytes]."""
        header = replace(message.header, session=self.session, counter=self._next_sent)
        clear, buffers = self._frames(header, encode_body(message))
        return len(clear) + body_size(buffers) + TAG_BYTES

    @span("open")
    def open(
        self, frames: Sequence[BytesLike], *, max_body: int = MAX_BODY, header: Header | ShortHeader | None = None
    ) -> Opened:
        """Open the peer's next message. A refused one leaves the session unchanged, except that a gap is skipped.

        Args:
            frames: unencrypted header, sealed body, and the body's shared part if it has one.
            max_body: maximum size of an accepted body [bytes].
            header: the clear header, if the caller has decoded it.

        Raises:
            RemoteWireError: ``malformed``, ``oversized``, ``wire_version``, ``wrong_run``, ``unknown_session``,
                ``unknown_sender``, ``wrong_receiver``, ``exhausted``, ``replay``, ``tampered`` or ``gap``. Of these
                only a gap and a wrong shared part are found in an authentic message; it counts as received.
        """
        clear, sealed, *shared = _parts(frames)
        header = header or decode_clear(clear)
        size = sealed.nbytes - TAG_BYTES
        largest = padded_size(max_body + MAX_PREFIX) if isinstance(header, ShortHeader) else max_body
        if size < 0:
            raise RemoteWireError(Reason.MALFORMED, "the sealed body is shorter than its tag")
        if size > largest:
            raise RemoteWireError(Reason.OVERSIZED, f"a body of {size} bytes, allowed {largest}")
        keys = self._keys_for(header)
        content = np.empty(size, np.uint8).data
        try:
            keys.cipher.decrypt_into(_nonce(header.counter, len(shared)), sealed, bytes(clear), content)
        except InvalidTag:
            raise RemoteWireError(
                Reason.TAMPERED, f"message {header.counter} of {self.peer} is not as sealed"
            ) from None
        expected = keys.next
        # A gap, shown by an authentic message only, costs that message but not the session: the lost messages stay
        # lost, no message is accepted out of order, and the next one is in order again.
        keys.next = header.counter + 1
        self.authentic, self.size = self.authentic + 1, self.size + body_size([content, *shared])
        if keys is self._coming:  # from now on the former keys are not needed
            self._receiving, self._coming = keys, None
        if header.counter != expected:
            raise RemoteWireError(Reason.GAP, f"message {header.counter} of {self.peer}, expected {expected}")
        tag = bytes(sealed[size:]).hex()
        if isinstance(header, Header):
            opened = Opened(header, content.toreadonly(), tag)
        else:
            opened = self._parted(header, content.toreadonly(), tag)
        return _joined(opened, shared[0], max_body) if shared else opened

    def _parted(self, short: ShortHeader, content: memoryview, tag: str) -> Opened:
        """A message whose header was sealed with its body."""
        header, body = split_content(content)
        if (header.wire_version, header.session, header.counter) != (short.wire_version, short.session, short.counter):
            raise RemoteWireError(Reason.MALFORMED, "the sealed header differs from the short one")
        if header.kind in HANDSHAKE_KINDS:
            raise RemoteWireError(Reason.UNEXPECTED, f"a {header.kind} after the handshake")
        self._check_names(header)
        return Opened(header, body, tag)

    def _keys_for(self, header: Header | ShortHeader) -> _Receiving:
        """The keys of a message; refuses a header that cannot be this session's next, before decrypting."""
        if header.wire_version != WIRE_VERSION:
            raise unknown_version(header.wire_version)
        if isinstance(header, Header):
            self._check_names(header)
        keys = self._receiving
        if self._coming is not None and header.session == self._coming.session:
            keys = self._coming
        if header.session != keys.session:
            raise RemoteWireError(Reason.UNKNOWN_SESSION, f"session {header.session.hex()}, here {keys.session.hex()}")
        if header.counter >= MAX_MESSAGES:
            raise RemoteWireError(Reason.EXHAUSTED, f"counter {header.counter}, allowed below {MAX_MESSAGES}")
        if header.counter < keys.next:
            raise RemoteWireError(Reason.REPLAY, f"message {header.counter}, expected {keys.next}")
        return keys

    def _check_names(self, header: Header) -> None:
        if header.run != self.run:
            raise RemoteWireError(Reason.WRONG_RUN, f"run {header.run}, here {self.run}")
        if header.sender != self.peer:
            raise RemoteWireError(Reason.UNKNOWN_SENDER, f"sender {header.sender} in a session with {self.peer}")
        if header.receiver != self.name:
            raise RemoteWireError(Reason.WRONG_RECEIVER, f"receiver {header.receiver}, here {self.name}")


def _joined(opened: Opened, sealed: memoryview, max_body: int) -> Opened:
    """A message with its shared part at its place in the body.

    Raises:
        RemoteWireError: ``malformed``, ``oversized``, or ``tampered`` if the shared part is not as sealed.
    """
    rest, size = opened.body[_SHARED.size :], sealed.nbytes - TAG_BYTES
    if opened.body.nbytes < _SHARED.size or size < 0:
        raise RemoteWireError(Reason.MALFORMED, "a shared part that is too short")
    start, number, key, found = _SHARED.unpack(opened.body[: _SHARED.size])
    if start > rest.nbytes:
        raise RemoteWireError(Reason.MALFORMED, f"a shared part at byte {start} of a body of {rest.nbytes} without it")
    if (whole := rest.nbytes + size) > max_body:
        raise RemoteWireError(Reason.OVERSIZED, f"a body of {whole} bytes, allowed {max_body}")
    body = np.empty(whole, np.uint8).data
    try:
        AESGCM(key).decrypt_into(bytes(12), sealed, None, body[start : start + size])
    except InvalidTag:
        raise RemoteWireError(Reason.TAMPERED, _not_as_sealed(opened)) from None
    body[:start], body[start + size :] = rest[:start], rest[start:]
    return replace(opened, body=body.toreadonly(), shared=(number, found.hex()))


def _not_as_sealed(opened: Opened) -> str:
    return f"the shared part of message {opened.header.counter} of {opened.header.sender} is not as sealed"


def seal_message(
    session: Session,
    message: Message,
    room: Callable[[int], memoryview] = fresh_memory,
    shared: SharedPart | None = None,
) -> Sealed:
    """Encode and seal a message.

    Args:
        session: of the receiver.
        message: its header's run, sender and receiver must be the session's.
        room: allocates memory of a size [bytes] for the sealed body.
        shared: one of the payloads, if it is sealed already.

    Raises:
        LocalWireError: see :meth:`Session.seal`.
    """
    if shared is None:
        return session.seal(message.header, encode_body(message), room)
    rest, start = encode_around(message, shared.payload)
    number = next(place for place, each in enumerate(message.payloads) if each is shared.payload)
    first = _SHARED.pack(start, number, shared.key, bytes.fromhex(digest(shared.payload)))
    return session.seal(message.header, [first, *rest], room, shared.sealed)


def open_message(session: Session, frames: Sequence[BytesLike], *, max_body: int = MAX_BODY) -> tuple[Message, str]:
    """Open and decode a message.

    Returns:
        The message, whose arrays are read-only views of the opened body, and its tag in hexadecimal.

    Raises:
        RemoteWireError: see :meth:`Session.open` and :func:`fedmq.wire.codec.decode`.
    """
    opened = session.open(frames, max_body=max_body)
    return decode_opened(opened, max_body=max_body), opened.tag


class UnreadableError(RemoteWireError):
    """An authentic message could not be decoded.

    Args:
        error: what is wrong with it.
    """

    def __init__(self, header: Header, error: RemoteWireError) -> None:
        super().__init__(error.reason, error.detail)
        self.header = header


@span("open")
def decode_opened(opened: Opened, *, max_body: int = MAX_BODY) -> Message:
    """Decode an opened message.

    Raises:
        UnreadableError: see :func:`fedmq.wire.codec.decode`; or a message of the handshake.
        RemoteWireError: ``tampered``: the shared part is another than the sender's.
    """
    try:
        if opened.header.kind in HANDSHAKE_KINDS | REKEY_KINDS:
            raise RemoteWireError(Reason.UNEXPECTED, f"a {opened.header.kind} after the handshake")
        message = decode(opened.header, opened.body, max_body=max_body)
    except RemoteWireError as error:
        raise UnreadableError(opened.header, error) from error
    if opened.shared is not None:
        # All who have the key can seal another part under it, even with the same tag: GCM does not bind a key to one.
        number, found = opened.shared
        if number >= len(message.payloads) or digest(message.payloads[number]) != found:
            raise RemoteWireError(Reason.TAMPERED, _not_as_sealed(opened))
    return message


def padded_size(size: int) -> int:
    """Size to which a sealed content of ``size`` bytes is padded: at least 4096, in four steps to each power of two.

    The padding therefore adds at most a quarter to larger ones.
    """
    size = max(size, LEAST_PADDED)
    step = (1 << size.bit_length() - 1) // _STEPS
    padded = -(-size // step) * step
    return padded if padded <= MAX_BODY else max(size, MAX_BODY)


def prefix_of(header: bytes, body: int) -> bytes:
    """The prefix of a body of ``body`` bytes: two lengths, the encoded header, zeros."""
    prefix = len(header).to_bytes(4, "little") + body.to_bytes(8, "little") + header
    return prefix + bytes(-len(prefix) % ALIGNMENT)


def split_content(content: memoryview) -> tuple[Header, memoryview]:
    """The header and the body of an opened content.

    Raises:
        RemoteWireError: ``malformed`` or ``wire_version``.
    """
    length = int.from_bytes(content[:4], "little")
    body = int.from_bytes(content[4:_LENGTHS], "little")
    start = _LENGTHS + length + -(_LENGTHS + length) % ALIGNMENT
    if content.nbytes < _LENGTHS or length > MAX_HEADER or start + body > content.nbytes:
        raise RemoteWireError(Reason.MALFORMED, "a sealed header or its body is longer than the message")
    if _any(content[_LENGTHS + length : start]) or _any(content[start + body :]):
        raise RemoteWireError(Reason.MALFORMED, "the padding is not zero")
    return decode_header(content[_LENGTHS : _LENGTHS + length]), content[start : start + body]


def _any(raw: BytesLike) -> bool:
    return bool(np.frombuffer(raw, np.uint8).any())


def _parts(frames: Sequence[BytesLike]) -> list[memoryview]:
    if len(frames) not in (2, 3):
        raise RemoteWireError(Reason.MALFORMED, f"{len(frames)} frames, expected 2 or 3")
    return [byte_view(frame) for frame in frames]


def _nonce(counter: int, shared: int) -> bytes:
    """12 bytes: the number of shared parts, 0 or 1, and the counter, big endian.

    Each direction has its own key, so no nonce repeats; and no frame can be added to a message, or taken from it.
    """
    return shared.to_bytes(4, "big") + counter.to_bytes(8, "big")
