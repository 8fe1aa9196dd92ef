"""Keys for ZeroMQ's CURVE security (CurveZMQ, rfc.zeromq.org/spec/26), derived from the processes' Ed25519 keys.

A connection over TCP is admitted only with an accepted key, before its first frame is read. Ed25519 and X25519 use the
same curve: a private key's scalar is that of RFC 8032, a public key's point is mapped to its Montgomery form by
u = (1 + y) / (1 - y) (RFC 7748, section 4.1), as libsodium and age do it. So no further keys need to be exchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

#: The prime of Curve25519; and the bit of an encoded point that holds the sign of its x coordinate.
PRIME, SIGN = 2**255 - 19, 1 << 255


@dataclass(frozen=True)
class ListenerKeys:
    """What a listener needs to admit peers.

    Args:
        key: its private key.
        accepted: accepted public keys by name; may change.
        names: names of the run's processes, for :meth:`claimed`.
    """

    key: Ed25519PrivateKey
    accepted: Mapping[str, Ed25519PublicKey]
    names: tuple[str, ...]

    def admits(self, public: bytes) -> bool:
        """Whether a CURVE public key belongs to an accepted key."""
        return any(public == curve_public(key) for key in self.accepted.values())

    def claimed(self, public: bytes) -> tuple[str, int] | None:
        """The name, and the sign of its public key, that a peer claims with a CURVE public key; None for no claim."""
        return self._claims.get(public)

    @cached_property
    def _claims(self) -> dict[bytes, tuple[str, int]]:
        claims = ((name, sign) for name in self.names for sign in (0, 1))
        return {public_of(claim_secret(name, sign)): (name, sign) for name, sign in claims}


@dataclass(frozen=True)
class ConnectionKeys:
    """What a connection needs to be admitted.

    Args:
        key: its private key.
        listener: the listener's public key.
        name: its name.
    """

    key: Ed25519PrivateKey
    listener: Ed25519PublicKey
    name: str

    @property
    def claim(self) -> bytes:
        """Secret of the CURVE key with which a refused peer says its name."""
        return claim_secret(self.name, self.key.public_key().public_bytes_raw()[31] >> 7)


def curve_secret(key: Ed25519PrivateKey) -> bytes:
    """The CURVE secret key, 32 bytes; X25519 clamps it as Ed25519 does."""
    return hashlib.sha512(key.private_bytes_raw()).digest()[:32]


def curve_public(key: Ed25519PublicKey) -> bytes:
    """The key for X25519 and CURVE, 32 bytes: the point's Montgomery form (RFC 7748, section 4.1)."""
    return _montgomery(key.public_bytes_raw())


@lru_cache(maxsize=1 << 14)  # computed when a key is read, needed at every connection
def _montgomery(public: bytes) -> bytes:
    y = int.from_bytes(public, "little") % SIGN
    return ((1 + y) * pow(1 - y, PRIME - 2, PRIME) % PRIME).to_bytes(32, "little")


def public_of(secret: bytes) -> bytes:
    """The CURVE public key of a secret key."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def ed25519_of(public: bytes, sign: int) -> Ed25519PublicKey:
    """The Ed25519 key of a CURVE public key, which leaves open the sign of the point's x coordinate, 0 or 1."""
    u = int.from_bytes(public, "little") % SIGN
    y = (u - 1) * pow(u + 1, -1, PRIME) % PRIME
    return Ed25519PublicKey.from_public_bytes((y | sign << 255).to_bytes(32, "little"))


def claim_secret(name: str, sign: int) -> bytes:
    """A CURVE secret key that anyone can compute: a refused peer presents it to say its name, which CURVE cannot carry.

    Args:
        name: the claimed name.
        sign: sign of the peer's Ed25519 public key, its last bit.
    """
    return hashlib.sha256(f"fedmq claim 1\n{name}\n{sign}\n".encode()).digest()
