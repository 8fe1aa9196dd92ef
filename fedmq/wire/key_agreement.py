"""Secrets of two ends from ephemeral X25519 and ML-KEM-768 keys, and the session keys that follow from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmq.errors import RemoteWireError
from fedmq.wire.messages import SESSION_BYTES, Reason
from fedmq.wire.sealed_sessions import KEY_BYTES

NONCE_BYTES = 32
#: Domain separation: no derived value can be used in place of another.
SESSION_LABEL = b"fedmq 1 session"
UP_LABEL = b"fedmq 1 initiator to responder"
DOWN_LABEL = b"fedmq 1 responder to initiator"


@dataclass(frozen=True)
class Ephemeral:
    """One side's secrets for a single handshake.

    Args:
        nonce: 32 bytes.
        x25519: private key.
        mlkem: ML-KEM-768 private key; the responder does not use its own.
    """

    nonce: bytes
    x25519: X25519PrivateKey
    mlkem: MLKEM768PrivateKey

    @classmethod
    def generate(cls) -> Ephemeral:
        """Draw secrets from the operating system's generator, never from the scenario's seed."""
        return cls(os.urandom(NONCE_BYTES), X25519PrivateKey.generate(), MLKEM768PrivateKey.generate())


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


def derive_keys(transcript: bytes, x25519_secret: bytes, mlkem_secret: bytes) -> tuple[bytes, bytes, bytes]:
    """Derive the session's identifier and keys (HKDF-SHA256, RFC 5869).

    Args:
        transcript: 32 bytes, the digest of hello and welcome.
        x25519_secret: 32 bytes.
        mlkem_secret: 32 bytes.

    Returns:
        Session identifier (16 bytes), key from initiator to responder (32), key from responder to initiator (32).
    """

    def derive(label: bytes, length: int) -> bytes:
        return HKDF(SHA256(), length, salt=transcript, info=label).derive(x25519_secret + mlkem_secret)

    return derive(SESSION_LABEL, SESSION_BYTES), derive(UP_LABEL, KEY_BYTES), derive(DOWN_LABEL, KEY_BYTES)
