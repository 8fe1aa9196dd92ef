"""Keys of a session from ephemeral X25519 and ML-KEM-768 secrets: in the handshake, and new ones within a session.

    initiator (silo, evaluator)                       responder (coordinator)
    begin_rekey()                   -- rekey -->      answer_rekey()
    finish_rekey()                  <-- rekeyed --    sends with the new keys from here on
    sends with the new keys from here on

Both messages are sealed with the session's current keys and signed. An attacker who has learnt the current keys, but no
private key, can neither read nor forge what follows. Until the first message of the other end under the new keys, its
messages are still opened with the old ones, which are then dropped. See docs/reference/wire.md.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmq.config.sections import Wire
from fedmq.errors import RemoteWireError
from fedmq.wire.codec import pack, unpack
from fedmq.wire.keys import Identity
from fedmq.wire.messages import SESSION_BYTES, Header, Reason
from fedmq.wire.sessions import KEY_BYTES, Opened, Sealed, Session, SessionKeys

MAX_HANDSHAKE_BODY = 4096
NONCE_BYTES = 32
X25519_BYTES = 32
MLKEM_PUBLIC_BYTES = 1184
MLKEM_CIPHERTEXT_BYTES = 1088
SIGNATURE_BYTES = 64
HELLO_FIELDS = {"nonce": NONCE_BYTES, "x25519": X25519_BYTES, "mlkem768": MLKEM_PUBLIC_BYTES}
WELCOME_FIELDS = {"nonce": NONCE_BYTES, "x25519": X25519_BYTES, "mlkem768": MLKEM_CIPHERTEXT_BYTES}
#: Domain separation: no derived value can be used in place of another.
SESSION_LABEL = b"fedmq 1 session"
UP_LABEL = b"fedmq 1 initiator to responder"
DOWN_LABEL = b"fedmq 1 responder to initiator"
REKEY_LABEL = b"fedmq 1 rekey"
REKEYED_LABEL = b"fedmq 1 rekeyed"
#: Maximum number of requests for new keys in a burst that a peer sends, and that the coordinator answers; one more is
#: allowed per second. The responder allows more than the initiator makes, so that delays on the network cannot end a
#: session.
MOST_REKEYS_MADE, MOST_REKEYS_ANSWERED = 30, 60


@dataclass(frozen=True)
class Ephemeral:
    """One side's secrets for a single handshake."""

    nonce: bytes  # 32 bytes
    x25519: X25519PrivateKey  # private key
    mlkem: MLKEM768PrivateKey  # ML-KEM-768 private key; the responder does not use its own

    @classmethod
    def generate(cls) -> Ephemeral:
        """Draw secrets from the operating system's generator, never from the scenario's seed."""
        return cls(os.urandom(NONCE_BYTES), X25519PrivateKey.generate(), MLKEM768PrivateKey.generate())

    def offer(self) -> Mapping[str, bytes]:
        """The initiator's fields, as in a hello."""
        return self.answer(self.mlkem.public_key().public_bytes_raw())

    def answer(self, mlkem768: bytes) -> Mapping[str, bytes]:
        """The responder's fields, as in a welcome, with the ciphertext of the ML-KEM secret."""
        return {"nonce": self.nonce, "x25519": self.x25519.public_key().public_bytes_raw(), "mlkem768": mlkem768}


def agreed_secrets(ephemeral: Ephemeral, mlkem768: bytes, x25519: bytes) -> tuple[bytes, bytes, bytes]:
    """The ML-KEM secret and its ciphertext, and the X25519 secret, from the public keys of a hello.

    Raises:
        RemoteWireError: ``malformed``: a public key is not usable.
    """
    try:
        mlkem_secret, ciphertext = MLKEM768PublicKey.from_public_bytes(mlkem768).encapsulate()
        x25519_secret = ephemeral.x25519.exchange(X25519PublicKey.from_public_bytes(x25519))
    except ValueError as error:
        raise RemoteWireError(Reason.MALFORMED, f"hello: not a usable public key: {error}") from error
    return mlkem_secret, ciphertext, x25519_secret


def initiator_secrets(ephemeral: Ephemeral, fields: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The X25519 and the ML-KEM secret from the fields of a welcome.

    Raises:
        RemoteWireError: ``malformed``: a public key or the ciphertext is not usable.
    """
    try:
        mlkem_secret = ephemeral.mlkem.decapsulate(fields["mlkem768"])
        x25519_secret = ephemeral.x25519.exchange(X25519PublicKey.from_public_bytes(fields["x25519"]))
    except ValueError as error:
        raise RemoteWireError(Reason.MALFORMED, f"welcome: not a usable key: {error}") from error
    return x25519_secret, mlkem_secret


def derive_keys(transcript: bytes, x25519_secret: bytes, mlkem_secret: bytes, *, initiator: bool) -> SessionKeys:
    """Derive one side's keys of a session (HKDF-SHA256, RFC 5869) from two secrets of 32 bytes.

    The transcript is the digest of hello and welcome, 32 bytes.
    """

    def derive(label: bytes, length: int) -> bytes:
        return HKDF(SHA256(), length, salt=transcript, info=label).derive(x25519_secret + mlkem_secret)

    up, down = derive(UP_LABEL, KEY_BYTES), derive(DOWN_LABEL, KEY_BYTES)
    send, receive = (up, down) if initiator else (down, up)
    return SessionKeys(session=derive(SESSION_LABEL, SESSION_BYTES), send_key=send, receive_key=receive)


def transcript_digest(*parts: bytes) -> bytes:
    """SHA-256 over the parts, each prefixed with its length (8 bytes, big endian), so that no two lists collide."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def checked_fields(raw: bytes, lengths: Mapping[str, int]) -> dict[str, Any]:
    """The fields of a message of the handshake: byte strings of given lengths.

    Raises:
        RemoteWireError: ``malformed``.
    """
    plain = unpack(raw, MAX_HANDSHAKE_BODY)
    if not isinstance(plain, dict) or plain.keys() != lengths.keys():
        raise RemoteWireError(Reason.MALFORMED, f"not a map with the keys {', '.join(sorted(lengths))}")
    for name, length in lengths.items():
        if type(plain[name]) is not bytes or len(plain[name]) != length:
            raise RemoteWireError(Reason.MALFORMED, f"{name} is not {length} bytes")
    return plain


def signed_fields(identity: Identity, label: bytes, context: tuple[bytes, ...], fields: Mapping[str, object]) -> bytes:
    """A signature and packed fields; the signature covers the label, the context and the fields."""
    packed = pack(fields)
    return identity.key.sign(label + transcript_digest(*context, packed)) + packed


def verified_fields(key: Ed25519PublicKey, label: bytes, context: tuple[bytes, ...], body: bytes) -> bytes:
    """The packed fields of what :func:`signed_fields` made, after verifying its signature.

    Raises:
        RemoteWireError: ``bad_signature``.
    """
    packed = body[SIGNATURE_BYTES:]
    try:
        key.verify(body[:SIGNATURE_BYTES], label + transcript_digest(*context, packed))
    except InvalidSignature:
        raise RemoteWireError(Reason.BAD_SIGNATURE, "the signature does not match the message or the sender") from None
    return packed


@dataclass(frozen=True)
class Rekeying:
    """The initiator's state between rekey and rekeyed."""

    session: bytes  # identifier of the session's current keys
    ephemeral: Ephemeral
    body: bytes  # body of the rekey


def rekey_due(session: Session, limits: Wire, seconds: float) -> bool:
    """Whether a session needs new keys, a real time [s] after it received the current ones."""
    return (
        seconds >= 3600 * limits.rekey_hours
        or session.sent + session.received >= limits.rekey_messages
        or session.size >= 1e9 * limits.rekey_gigabytes
    )


def begin_rekey(
    identity: Identity, session: Session, header: Header, ephemeral: Ephemeral | None = None
) -> tuple[Sealed, Rekeying]:
    """Ask for new keys: the sealed rekey, and the state that :func:`finish_rekey` takes.

    Args:
        identity: the initiator's name and key.
        session: the session, with its current keys.
        header: a header of kind ``rekey``.
        ephemeral: ephemeral secrets for golden frames in tests; generated by default.
    """
    ephemeral = ephemeral or Ephemeral.generate()
    rekey = signed_fields(identity, REKEY_LABEL, (session.session,), ephemeral.offer())
    state = Rekeying(session.session, ephemeral, rekey)
    return session.seal(header, [state.body]), state


def answer_rekey(
    identity: Identity,
    peer_key: Ed25519PublicKey,
    session: Session,
    asked: Opened,
    header: Header,
    ephemeral: Ephemeral | None = None,
) -> Sealed:
    """Answer a rekey; everything sealed after the answer uses the new keys.

    Args:
        identity: the responder's name and key.
        peer_key: public key of the initiator.
        session: the session, with its current keys.
        asked: the opened rekey.
        header: a header of kind ``rekeyed``.
        ephemeral: ephemeral secrets for golden frames in tests; generated by default.

    Raises:
        RemoteWireError: ``malformed``, ``bad_signature``, or ``unexpected``: the last rekey is not completed yet.
    """
    body = bytes(asked.body)
    if asked.header.session != session.session:
        raise RemoteWireError(Reason.UNEXPECTED, "a rekey before the last one is completed")
    fields = verified_fields(peer_key, REKEY_LABEL, (session.session,), body)
    plain = checked_fields(fields, HELLO_FIELDS)
    ephemeral = ephemeral or Ephemeral.generate()
    mlkem_secret, ciphertext, x25519_secret = agreed_secrets(ephemeral, plain["mlkem768"], plain["x25519"])
    answered = signed_fields(identity, REKEYED_LABEL, (session.session, body), ephemeral.answer(ciphertext))
    transcript = transcript_digest(session.session, body, answered)
    sealed = session.seal(header, [answered])
    session.rekey(derive_keys(transcript, x25519_secret, mlkem_secret, initiator=False))
    return sealed


def finish_rekey(state: Rekeying, peer_key: Ed25519PublicKey, session: Session, answered: Opened) -> None:
    """Process the answer; everything sealed afterwards uses the new keys.

    Args:
        state: from :func:`begin_rekey`.
        peer_key: public key of the responder.
        session: the session, with its current keys.
        answered: the opened rekeyed.

    Raises:
        RemoteWireError: ``malformed`` or ``bad_signature``.
    """
    body = bytes(answered.body)
    fields = checked_fields(verified_fields(peer_key, REKEYED_LABEL, (state.session, state.body), body), WELCOME_FIELDS)
    x25519_secret, mlkem_secret = initiator_secrets(state.ephemeral, fields)
    transcript = transcript_digest(state.session, state.body, body)
    session.rekey(derive_keys(transcript, x25519_secret, mlkem_secret, initiator=True))
