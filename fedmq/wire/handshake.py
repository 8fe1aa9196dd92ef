"""The handshake: a signed ephemeral X25519 exchange joined with ML-KEM-768. See docs/reference/wire.md.

    initiator (silo, evaluator)                       responder (coordinator)
    initiate()                      -- hello -->      respond()
    complete()                      <-- welcome --
      has a Session                 -- ready -->      confirm()
                                                        has a Session

Both ephemeral secrets must be found to read what the session carried; both sides sign what they saw of the exchange.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmq.errors import RemoteWireError
from fedmq.wire.codec import BytesLike, decode_header, encode_header, pack, unpack
from fedmq.wire.keys import Identity
from fedmq.wire.messages import SESSION_BYTES, WIRE_VERSIONS, Header, Kind, Reason
from fedmq.wire.sessions import KEY_BYTES, Session

MAX_HANDSHAKE_BODY = 4096
NONCE_BYTES = 32
X25519_BYTES = 32
MLKEM_PUBLIC_BYTES = 1184
MLKEM_CIPHERTEXT_BYTES = 1088
SIGNATURE_BYTES = 64
MAX_VERSIONS = 16

#: What each signature and each derived value is bound to, so that none can stand in for another.
HELLO_LABEL = b"fedmq 1 hello"
WELCOME_LABEL = b"fedmq 1 welcome"
READY_LABEL = b"fedmq 1 ready"
SESSION_LABEL = b"fedmq 1 session"
UP_LABEL = b"fedmq 1 initiator to responder"
DOWN_LABEL = b"fedmq 1 responder to initiator"

_HELLO = {"nonce": NONCE_BYTES, "x25519": X25519_BYTES, "mlkem768": MLKEM_PUBLIC_BYTES}
_WELCOME = {"nonce": NONCE_BYTES, "x25519": X25519_BYTES, "mlkem768": MLKEM_CIPHERTEXT_BYTES}

Accepted = Mapping[str, Ed25519PublicKey]


@dataclass(frozen=True)
class Ephemeral:
    """One handshake's own secrets, used once and dropped.

    Args:
        nonce: 32 bytes.
        x25519: private key.
        mlkem: ML-KEM-768 private key; the responder's stays unused.
    """

    nonce: bytes
    x25519: X25519PrivateKey
    mlkem: MLKEM768PrivateKey

    @classmethod
    def generate(cls) -> Ephemeral:
        """From the operating system's generator: secrets never come from the scenario's seed."""
        return cls(os.urandom(NONCE_BYTES), X25519PrivateKey.generate(), MLKEM768PrivateKey.generate())


@dataclass(frozen=True)
class Initiated:
    """The initiator's state between hello and welcome."""

    identity: Identity
    responder: str
    run: str
    ephemeral: Ephemeral
    hello: tuple[bytes, bytes]


@dataclass(frozen=True)
class Responded:
    """The responder's state between welcome and ready: the session counts only once ``confirm`` has seen ready."""

    session: Session
    peer: str
    peer_key: Ed25519PublicKey
    transcript: bytes


def initiate(
    identity: Identity, responder: str, run: str, sent_at: float, ephemeral: Ephemeral | None = None
) -> tuple[tuple[bytes, bytes], Initiated]:
    """Open a handshake.

    Args:
        identity: of the initiator.
        responder: name of the other side, in practice ``coordinator``.
        run: the run's name.
        sent_at: [s].
        ephemeral: for golden frames only; otherwise generated.

    Returns:
        The frames of hello, and the state that ``complete`` takes.
    """
    ephemeral = ephemeral or Ephemeral.generate()
    # The lowest version, so that a peer that speaks any of ours can read the hello; the body lists them all.
    header = Header(
        run=run,
        kind=Kind.HELLO,
        sender=identity.name,
        receiver=responder,
        sequence=0,
        sent_at=sent_at,
        wire_version=min(WIRE_VERSIONS),
    )
    fields: dict[str, Any] = {
        "versions": list(WIRE_VERSIONS),
        "nonce": ephemeral.nonce,
        "x25519": ephemeral.x25519.public_key().public_bytes_raw(),
        "mlkem768": ephemeral.mlkem.public_key().public_bytes_raw(),
    }
    frames = _signed(identity, HELLO_LABEL, b"", header, fields)
    return frames, Initiated(identity, responder, run, ephemeral, frames)


def respond(
    identity: Identity,
    accepted: Accepted,
    run: str,
    frames: Sequence[BytesLike],
    sent_at: float,
    *,
    ephemeral: Ephemeral | None = None,
) -> tuple[tuple[bytes, bytes], Responded]:
    """Answer a hello.

    Returns:
        The frames of welcome, and the state that ``confirm`` takes.

    Raises:
        RemoteWireError: ``malformed``, ``oversized``, ``wire_version``, ``unexpected``, ``wrong_run``,
            ``wrong_receiver``, ``unknown_sender`` or ``bad_signature``.
    """
    hello = _frames(frames)
    header, key = _peer(hello, Kind.HELLO, run, identity.name, accepted)
    if header.sender == identity.name:
        raise RemoteWireError(Reason.UNKNOWN_SENDER, f"{identity.name} greets itself")
    fields = _fields(_verified(key, HELLO_LABEL, b"", hello), _HELLO, versions=True)
    shared = [version for version in fields["versions"] if version in WIRE_VERSIONS]
    if not shared:
        spoken = ", ".join(map(str, WIRE_VERSIONS))
        raise RemoteWireError(Reason.WIRE_VERSION, f"wire versions {fields['versions']}, spoken here: {spoken}")

    ephemeral = ephemeral or Ephemeral.generate()
    mlkem_secret, ciphertext, x25519_secret = _agreed_secrets(ephemeral, fields["mlkem768"], fields["x25519"])
    answer = Header(
        run=run,
        kind=Kind.WELCOME,
        sender=identity.name,
        receiver=header.sender,
        sequence=0,
        reply_to=header.sequence,
        sent_at=sent_at,
        wire_version=max(shared),
    )
    mine: dict[str, Any] = {
        "nonce": ephemeral.nonce,
        "x25519": ephemeral.x25519.public_key().public_bytes_raw(),
        "mlkem768": ciphertext,
    }
    welcome = _signed(identity, WELCOME_LABEL, _digest(*hello), answer, mine)
    transcript = _digest(*hello, *welcome)
    session_id, up, down = derive_keys(transcript, x25519_secret, mlkem_secret)
    session = Session(
        run=run,
        name=identity.name,
        peer=header.sender,
        session=session_id,
        send_key=down,
        receive_key=up,
        wire_version=answer.wire_version,
    )
    return welcome, Responded(session, header.sender, key, transcript)


def _agreed_secrets(ephemeral: Ephemeral, mlkem768: bytes, x25519: bytes) -> tuple[bytes, bytes, bytes]:
    """The ML-KEM secret with its ciphertext, and the X25519 secret, from the public keys of a hello.

    Raises:
        RemoteWireError: ``malformed``: one of them is no usable public key.
    """
    try:
        mlkem_secret, ciphertext = MLKEM768PublicKey.from_public_bytes(mlkem768).encapsulate()
        x25519_secret = ephemeral.x25519.exchange(X25519PublicKey.from_public_bytes(x25519))
    except ValueError as error:
        raise RemoteWireError(Reason.MALFORMED, f"hello: not a usable public key: {error}") from error
    return mlkem_secret, ciphertext, x25519_secret


def complete(
    state: Initiated, accepted: Accepted, frames: Sequence[BytesLike], sent_at: float
) -> tuple[tuple[BytesLike, ...], Session]:
    """Take the welcome.

    Returns:
        The frames of ready, and the session; it may seal at once, as ready comes first on the same connection.

    Raises:
        RemoteWireError: as ``respond``.
    """
    welcome = _frames(frames)
    me = state.identity
    header, key = _peer(welcome, Kind.WELCOME, state.run, me.name, accepted)
    if header.sender != state.responder:
        raise RemoteWireError(Reason.UNKNOWN_SENDER, f"welcome by {header.sender}, asked {state.responder}")
    if header.reply_to != 0:
        raise RemoteWireError(Reason.UNEXPECTED, "this welcome answers another hello")
    fields = _fields(_verified(key, WELCOME_LABEL, _digest(*state.hello), welcome), _WELCOME)
    try:
        mlkem_secret = state.ephemeral.mlkem.decapsulate(fields["mlkem768"])
        x25519_secret = state.ephemeral.x25519.exchange(X25519PublicKey.from_public_bytes(fields["x25519"]))
    except ValueError as error:
        raise RemoteWireError(Reason.MALFORMED, f"welcome: not a usable key: {error}") from error
    transcript = _digest(*state.hello, *welcome)
    session_id, up, down = derive_keys(transcript, x25519_secret, mlkem_secret)
    session = Session(
        run=state.run,
        name=me.name,
        peer=header.sender,
        session=session_id,
        send_key=up,
        receive_key=down,
        wire_version=header.wire_version,
    )
    ready = Header(
        run=state.run,
        kind=Kind.READY,
        sender=me.name,
        receiver=header.sender,
        sequence=0,
        reply_to=header.sequence,
        sent_at=sent_at,
    )
    return session.seal(ready, [me.key.sign(READY_LABEL + transcript)]).frames, session


def confirm(state: Responded, frames: Sequence[BytesLike]) -> Session:
    """Take the ready: the initiator holds the keys and signed the whole exchange.

    A refused ready does not spoil the handshake: the genuine one may still come.

    Returns:
        The session, in which ready was the initiator's message 0.

    Raises:
        RemoteWireError: as :meth:`Session.open`, or ``unexpected``, or ``bad_signature``.
    """
    if state.session.received:
        raise RemoteWireError(Reason.UNEXPECTED, "this handshake was confirmed before")
    opened = state.session.open(frames, max_body=MAX_HANDSHAKE_BODY)
    if opened.header.kind is not Kind.READY:
        raise RemoteWireError(Reason.UNEXPECTED, f"a {opened.header.kind}, expected a ready")
    try:
        state.peer_key.verify(bytes(opened.body), READY_LABEL + state.transcript)
    except InvalidSignature:
        raise RemoteWireError(Reason.BAD_SIGNATURE, f"{state.peer} did not sign this exchange") from None
    return state.session


def derive_keys(transcript: bytes, x25519_secret: bytes, mlkem_secret: bytes) -> tuple[bytes, bytes, bytes]:
    """The session's name and keys.

    Args:
        transcript: 32 bytes, of hello and welcome.
        x25519_secret: 32 bytes.
        mlkem_secret: 32 bytes.

    Returns:
        Session (16 bytes), key from initiator to responder (32), key from responder to initiator (32).
    """

    def derive(label: bytes, length: int) -> bytes:
        return HKDF(SHA256(), length, salt=transcript, info=label).derive(x25519_secret + mlkem_secret)

    return derive(SESSION_LABEL, SESSION_BYTES), derive(UP_LABEL, KEY_BYTES), derive(DOWN_LABEL, KEY_BYTES)


def _digest(*parts: bytes) -> bytes:
    """SHA-256 over the parts, each behind its length (8 bytes, big endian), so that no two lists agree."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def _signed(
    identity: Identity, label: bytes, context: bytes, header: Header, fields: dict[str, Any]
) -> tuple[bytes, bytes]:
    """Frames of a handshake message: header, then signature and fields; it covers context, header and fields."""
    clear = encode_header(header)
    packed = pack(fields)
    return clear, identity.key.sign(label + _digest(context, clear, packed)) + packed


def _verified(key: Ed25519PublicKey, label: bytes, context: bytes, frames: tuple[bytes, bytes]) -> bytes:
    """The packed fields of a handshake message, once their signature is seen to be the sender's."""
    clear, body = frames
    signature, packed = body[:SIGNATURE_BYTES], body[SIGNATURE_BYTES:]
    try:
        key.verify(signature, label + _digest(context, clear, packed))
    except InvalidSignature:
        raise RemoteWireError(Reason.BAD_SIGNATURE, "the signature does not fit the message or the sender") from None
    return packed


def _frames(frames: Sequence[BytesLike]) -> tuple[bytes, bytes]:
    if len(frames) != 2:
        raise RemoteWireError(Reason.MALFORMED, f"{len(frames)} frames, expected 2")
    if any(memoryview(frame).nbytes > MAX_HANDSHAKE_BODY for frame in frames):
        raise RemoteWireError(Reason.OVERSIZED, f"a handshake frame above {MAX_HANDSHAKE_BODY} bytes")
    return bytes(frames[0]), bytes(frames[1])


def _peer(
    frames: tuple[bytes, bytes], kind: Kind, run: str, me: str, accepted: Accepted
) -> tuple[Header, Ed25519PublicKey]:
    """The header of a handshake message, and the key its sender must have signed with."""
    header = decode_header(frames[0])
    if header.kind is not kind:
        raise RemoteWireError(Reason.UNEXPECTED, f"a {header.kind}, expected a {kind}")
    if header.run != run:
        raise RemoteWireError(Reason.WRONG_RUN, f"run {header.run}, here {run}")
    if header.receiver != me:
        raise RemoteWireError(Reason.WRONG_RECEIVER, f"receiver {header.receiver}, here {me}")
    key = accepted.get(header.sender)
    if key is None:
        raise RemoteWireError(Reason.UNKNOWN_SENDER, f"no key of {header.sender} is accepted here")
    return header, key


def _fields(raw: bytes, lengths: Mapping[str, int], *, versions: bool = False) -> dict[str, Any]:
    """The fields of a handshake message: byte strings of known lengths, in hello also the versions."""
    plain = unpack(raw, MAX_HANDSHAKE_BODY)
    names = {*lengths, "versions"} if versions else set(lengths)
    if not isinstance(plain, dict) or plain.keys() != names:
        raise RemoteWireError(Reason.MALFORMED, f"not a map of {', '.join(sorted(names))}")
    for name, length in lengths.items():
        if type(plain[name]) is not bytes or len(plain[name]) != length:
            raise RemoteWireError(Reason.MALFORMED, f"{name} is not {length} bytes")
    if versions:
        listed = plain["versions"]
        if (
            not isinstance(listed, list)
            or not 1 <= len(listed) <= MAX_VERSIONS
            or any(type(version) is not int or not 1 <= version <= 0xFFFF for version in listed)
        ):
            raise RemoteWireError(Reason.MALFORMED, f"versions is not a list of 1 to {MAX_VERSIONS} numbers")
    return plain
