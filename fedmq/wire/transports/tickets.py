"""Tickets, with which a listener over TCP admits a connection before its first frame is read.

A ticket is the password of ZeroMQ's PLAIN mechanism (rfc.zeromq.org/spec/24): a statement, signed with the peer's key,
that it connects to this listener now. It encrypts nothing; the session above it does. See docs/reference/wire.md.
"""

from __future__ import annotations

import base64
import binascii
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedmq.errors import InputError
from fedmq.text import printable
from fedmq.wire.keys import Identity, fingerprint, public_key_of, words
from fedmq.wire.messages import COORDINATOR

LABEL = b"fedmq 1 ticket"
TIME_BYTES, NONCE_BYTES, SIGNATURE_BYTES = 8, 16, 64
TICKET_BYTES = 2 * 32 + TIME_BYTES + NONCE_BYTES + SIGNATURE_BYTES
#: A ticket is valid if its time differs from the listener's clock by at most this [s]: clocks of machines without NTP
#: are wrong by hours.
VALID_SECONDS = 24 * 3600.0
#: Connections that a ticket admits, and the time from the first to the last one [s]: ZeroMQ repeats a connection that
#: fails, and a relay that sends copies ahead must not use up what their sender needs.
USES, USE_SECONDS = 4, 10.0
#: Used tickets of a key that are remembered, the newest ones; no older one is valid.
REMEMBERED = 256


@dataclass(frozen=True)
class Verdict:
    """What a listener decides about a connection."""

    status: bytes  # the code that the peer gets, of the ZeroMQ Authentication Protocol (rfc.zeromq.org/spec/27)
    key: str = ""  # the peer's public key, in hexadecimal; empty unless it is admitted
    why: str = ""  # why it is not admitted, for the listener's operator


#: Codes: admitted; refused; refused as the ticket is for a listener with another key.
ADMITTED, REFUSED, FOREIGN = b"200", b"400", b"500"


@dataclass
class _Use:
    """A ticket that was used: its own time [ms], the listener's time of the first use [s], and the number of uses."""

    made_ms: int
    first: float
    count: int = 0


@dataclass(frozen=True)
class ListenerKeys:
    """What a listener needs to admit peers."""

    key: Ed25519PublicKey
    accepted: Mapping[str, Ed25519PublicKey]  # accepted public keys by name; may change
    now: Callable[[], float] = time.time  # the time [s since 1970, UTC]

    def accepts(self, public: bytes) -> bool:
        """Whether the 32 bytes of a public key are those of an accepted one."""
        return any(public == key.public_bytes_raw() for key in self.accepted.values())


@dataclass(frozen=True)
class ConnectionKeys:
    """What a connection needs to be admitted."""

    key: Ed25519PrivateKey
    listener: Ed25519PublicKey  # the listener's public key
    name: str

    @classmethod
    def to_coordinator(cls, identity: Identity, accepted: Mapping[str, Ed25519PublicKey]) -> ConnectionKeys:
        """The keys of a process for its connection to the coordinator.

        Raises:
            InputError: no key of the coordinator is accepted.
        """
        if (coordinator := accepted.get(COORDINATOR)) is None:
            allowed = "the coordinator's, accepted with `fedmq keys accept`"
            raise InputError(f"keys of {identity.name}: accepted", "no key of the coordinator", allowed)
        return cls(identity.key, coordinator, identity.name)

    def ticket(self, now: float) -> bytes:
        """A new ticket, in base64, of a time [s since 1970, UTC]."""
        own, listener = self.key.public_key().public_bytes_raw(), self.listener.public_bytes_raw()
        fields = own + listener + int(1000 * now).to_bytes(TIME_BYTES, "big") + os.urandom(NONCE_BYTES)
        return base64.b64encode(fields + self.key.sign(_statement(fields, self.name.encode())))


def _statement(fields: bytes, name: bytes) -> bytes:
    return LABEL + fields + name


class TicketGate:
    """Decides which connections a listener admits; used by one thread.

    Args:
        keys: the listener's key, and those that it accepts.
    """

    def __init__(self, keys: ListenerKeys) -> None:
        self._keys, self._own = keys, keys.key.public_bytes_raw()
        # By public key, then by signature.
        self._uses: dict[bytes, dict[bytes, _Use]] = {}

    def judge(self, name: bytes, ticket: bytes) -> Verdict:
        """Decide about a connection, and count the use of its ticket.

        Args:
            name: of the peer, as it says.
            ticket: in base64.
        """
        try:
            raw = base64.b64decode(ticket, validate=True)
        except binascii.Error:
            raw = b""
        if len(raw) != TICKET_BYTES:
            return Verdict(REFUSED, why="no ticket")
        who = f"claims to be {printable(name.decode(errors='replace'))}, with"
        fields, signature = raw[:-SIGNATURE_BYTES], raw[-SIGNATURE_BYTES:]
        own, listener, moment = fields[:32], fields[32:64], fields[64 : 64 + TIME_BYTES]
        if listener != self._own:
            return Verdict(FOREIGN, why=f"{who} a ticket for a coordinator with another key")
        try:
            key = public_key_of(own)
            key.verify(signature, _statement(fields, name))
        except (ValueError, InvalidSignature):
            return Verdict(REFUSED, why=f"{who} a ticket that its key did not sign")
        if not self._keys.accepts(own):
            known = f"the unknown key SHA256 {fingerprint(key)} ({words(key)})"
            return Verdict(REFUSED, why=f"{who} {known}; `fedmq keys accept` accepts its request")
        now, made_ms = self._keys.now(), int.from_bytes(moment, "big")
        if abs(age := now - made_ms / 1000) > VALID_SECONDS:
            return Verdict(REFUSED, why=f"{who} a ticket of {age / 3600:+.0f} h: it is old, or a clock is wrong")
        if not self._use(own, signature, made_ms, now):
            return Verdict(REFUSED, why=f"{who} a ticket that was used before")
        return Verdict(ADMITTED, key=own.hex())

    def _use(self, own: bytes, signature: bytes, made_ms: int, now: float) -> bool:
        """Count a use of a valid ticket of a key; returns whether it may be used."""
        uses = self._uses.setdefault(own, {})
        if signature not in uses:
            uses[signature] = _Use(made_ms, now)
            if len(uses) > REMEMBERED:  # a ticket older than all of these is itself dropped, and so never valid
                del uses[min(uses, key=lambda each: uses[each].made_ms)]
        use = uses.get(signature)
        if use is None or use.count >= USES or now - use.first > USE_SECONDS:
            return False
        use.count += 1
        return True
