"""Secure aggregation: the keys, masks, shares and rules of sums in which no other party sees a silo's update.

Double masking with a complete graph (Bonawitz et al., CCS 2017, figure 4). Silo u sends its weighted update in fixed
point, modulo 2^32, plus the mask of its own seed, plus or minus a mask for each other silo v, which both derive from an
X25519 exchange. In the sum of all silos the masks of pairs cancel. Of a silo whose update is in the sum, the others
reveal their shares of its own seed; of one that dropped out, those of its key; never both. ``docs/explanation/
secure_sums.md`` has the steps and what they protect. No secret is derived from the scenario's seed; the sum, and so the
model, does not depend on secrets, because all masks cancel exactly.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Self

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir, _Element
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedmq.config.privacy import SecureAggregation
from fedmq.errors import InputError, RemoteWireError
from fedmq.wire.codec import digest
from fedmq.wire.keys import Identity
from fedmq.wire.messages import Message, Reason
from fedmq.wire.payloads import (
    F32,
    F64,
    I64,
    U8,
    ClassPrototypes,
    Delta,
    DiscriminatorDelta,
    Memory,
    PartialDelta,
    Refusal,
    Representations,
    RouterSums,
    SumKeys,
    SumWeights,
    Survivors,
    UpdateReport,
    WithheldBy,
)

U32 = NDArray[np.uint32]
#: Size of a seed of masks or of a key: one secret of Shamir's scheme over GF(2^128) [bytes].
SEED_BYTES = 16
_KEY_BYTES, _NONCE_BYTES = 32, 12
#: Steps of the fixed point for the largest change of a parameter; sums of weights up to 1 then stay below 2^31.
STEPS = float(1 << 30)
#: Kinds of payloads that hold an update or class rows of a silo: in a run with secure sums they never leave it.
IN_CLEAR = frozenset(
    kind.KIND
    for kind in (Delta, PartialDelta, DiscriminatorDelta, ClassPrototypes, Memory, Representations, RouterSums)
)
#: Numbers masked at a time, so that they stay in the processor's cache.
_BLOCK = 1 << 15
_ZEROS = memoryview(bytes(4 * _BLOCK))


def _joined(*parts: bytes | str | int) -> bytes:
    """Parts with their lengths, so that no two lists of parts give the same bytes."""
    raw = (part if isinstance(part, bytes) else str(part).encode() for part in parts)
    return b"".join(len(part).to_bytes(8, "big") + part for part in raw)


def _derived(secret: bytes, label: str, context: bytes = b"", length: int = _KEY_BYTES) -> bytes:
    return HKDF(SHA256(), length, salt=None, info=_joined(f"fedmq 1 sum {label}", context)).derive(secret)


def refused(detail: str) -> RemoteWireError:
    """The refusal of a message that breaks a rule of secure sums."""
    return RemoteWireError(Reason.SUM, detail)


def only_masked(
    forbidden: Callable[[Message, int], Refusal | None] | None, report: Callable[[str], object]
) -> Callable[[Message, int], Refusal | None]:
    """A channel's rule (see ``fedmq.wire.channel``) that lets no update or class rows leave in clear.

    ``forbidden`` is the rule of the site's policy, if it has one; ``report`` is called with one line on what is
    withheld.
    """

    def rule(message: Message, size: int) -> Refusal | None:
        for payload in message.payloads:
            if payload.KIND in IN_CLEAR:
                report(f"withholds {payload.KIND}: only masked updates leave a silo of a run with secure sums")
                return Refusal(WithheldBy.KINDS.value, payload.KIND)
        return None if forbidden is None else forbidden(message, size)

    return rule


def roster_digest(place: str, accepted: Mapping[str, Ed25519PublicKey], silos: Sequence[str]) -> str:
    """SHA-256 (hex) of the run's silos and their public keys, as accepted here.

    Raises:
        InputError: the key of a silo is not accepted.
    """
    if missing := [name for name in silos if name not in accepted]:
        allowed = "the public keys of all silos, as privacy.secure_aggregation needs them; see `fedmq keys accept`"
        raise InputError(f"{place}: accepted", f"no key of {missing[0]}", allowed)
    return digest_of_roster({name: accepted[name].public_bytes_raw() for name in silos})


def digest_of_roster(keys: Mapping[str, bytes]) -> str:
    """SHA-256 (hex) of the run's silos and their public keys, by name, in the order of the run."""
    parts = (part for pair in keys.items() for part in pair)
    return hashlib.sha256(_joined("fedmq 1 sum roster", *parts)).hexdigest()


def needed(silos: int, threshold: float) -> int:
    """Number of silos that have to answer in each step, and of shares that reveal a secret."""
    return min(silos, math.floor(threshold * silos + 1e-9) + 1)


def singles_out(weights: F64, options: SecureAggregation, ratio: float = 1.0) -> str | None:
    """Why a branch's weights [N] would show too much of one silo's update; None if they do not, or are all 0.

    Args:
        weights: of the silos, at least 0.
        options: the limits.
        ratio: largest ratio of two silos' own factors, by which they multiply what they add; the worst case counts.
    """
    if not (total := float(weights.sum())):
        return None
    relative = np.sort(weights)[::-1] / total
    # The first silos have the factor `ratio`, the others 1; one more silo in each entry.
    sums, squares = 1 + (ratio - 1) * np.cumsum(relative), (relative**2).sum() + (ratio**2 - 1) * np.cumsum(relative**2)
    largest, effective = ratio * float(relative[0] / sums[0]), float((sums**2 / squares).min())
    if largest > options.max_weight + 1e-9:
        return f"a largest weight of {largest:.3f}, allowed: at most {options.max_weight:g} (max_weight)"
    if effective < options.min_contributors - 1e-9:
        allowed = f"at least {options.min_contributors:g} (min_contributors)"
        return f"weights of {effective:.2f} effective silos, allowed: {allowed}"
    return None


# ------------------------------------------------------------------------------------------------------ keys
@dataclass(frozen=True)
class RoundSecrets:
    """A silo's secrets of one round; the same for a round that is repeated."""

    own_seed: bytes  # of its own mask
    key_seed: bytes  # of the private key of its masks for pairs
    seal_key: X25519PrivateKey  # opens the shares that are sealed for it

    @classmethod
    def derive(cls, secret: bytes, run: str, version: int) -> Self:
        """Derive them from a random secret of the silo that it keeps for the run."""
        raw = _derived(secret, "secrets", _joined(run, version), 2 * SEED_BYTES + _KEY_BYTES)
        own, key = raw[:SEED_BYTES], raw[SEED_BYTES : 2 * SEED_BYTES]
        return cls(own, key, X25519PrivateKey.from_private_bytes(raw[2 * SEED_BYTES :]))

    @cached_property
    def mask_key(self) -> X25519PrivateKey:
        """The private key of its masks for pairs."""
        return mask_key(self.key_seed)

    @property
    def public(self) -> U8:
        """The public keys (2, 32) of :class:`UpdateReport`."""
        keys = (self.mask_key, self.seal_key)
        return _bytes(b"".join(key.public_key().public_bytes_raw() for key in keys)).reshape(2, 32)


def mask_key(seed: bytes) -> X25519PrivateKey:
    """The private key of a silo's masks for pairs."""
    return X25519PrivateKey.from_private_bytes(_derived(seed, "mask key"))


def commitment(own_seed: bytes) -> bytes:
    """The commitment to a seed, by which what shares give is checked."""
    return hashlib.sha256(_joined("fedmq 1 sum seed", own_seed)).digest()


def _bytes(raw: bytes) -> U8:
    return np.frombuffer(raw, np.uint8).copy()


def public_key(keys: SumKeys, name: str, which: int) -> X25519PublicKey:
    """A silo's public key: of its masks (0) or of the shares sealed for it (1)."""
    return X25519PublicKey.from_public_bytes(keys.keys[keys.silos.index(name), which].tobytes())


def _exchanged(key: X25519PrivateKey, public: X25519PublicKey) -> bytes:
    try:
        return key.exchange(public)
    except ValueError:  # a point of small order, with which everybody knows the result
        raise refused("a public key that is not one") from None


def _signed(run: str, version: int, name: str, roster: str, keys: U8, committed: U8) -> bytes:
    return _joined("fedmq 1 sum keys", run, version, name, roster, keys.tobytes(), committed.tobytes())


def report(
    identity: Identity,
    own: RoundSecrets,
    run: str,
    version: int,
    roster: str,
    n_samples: int,
    trained: Iterable[str],
    support: I64,
) -> UpdateReport:
    """A silo's signed report of the update, and of the rows, that it keeps."""
    committed = _bytes(commitment(own.own_seed))
    signature = identity.key.sign(_signed(run, version, identity.name, roster, own.public, committed))
    return UpdateReport(n_samples, tuple(trained), support, roster, own.public, committed, _bytes(signature))


def check_signature(
    key: Ed25519PublicKey, run: str, version: int, name: str, roster: str, keys: U8, committed: U8, signature: U8
) -> None:
    """Check the signature of a silo's keys of a round by its accepted key.

    Raises:
        RemoteWireError: it is not the silo's, or of another round, run or list of silos.
    """
    try:
        key.verify(signature.tobytes(), _signed(run, version, name, roster, keys, committed))
    except InvalidSignature:
        detail = f"keys that {name} did not sign for this round and these silos"
        raise RemoteWireError(Reason.BAD_SIGNATURE, detail) from None


# ------------------------------------------------------------------------------------------------------ masks
@dataclass(frozen=True)
class Mask:
    """A mask of some sections: the key stream of AES-256 with a key."""

    key: bytes
    sign: int  # 1 to add it, -1 to remove it
    places: frozenset[int]  # sections that have it, by index


@dataclass(frozen=True)
class Sum:
    """What all silos of one sum have to agree on; masks of silos that were told different things do not cancel."""

    run: str
    version: int
    roster: str  # digest
    keys: SumKeys
    weights: SumWeights
    sizes: tuple[int, ...]  # number of values of each section, that is branch or row
    bounds: tuple[float, ...]  # bound of their magnitude in each section
    first_row: int  # index of the first section that is a row

    @cached_property
    def context(self) -> bytes:
        """The digest of all of it, from which masks are derived."""
        bounds = _joined(*map(float.hex, self.bounds))
        parts = (self.run, self.version, self.roster, digest(self.keys), digest(self.weights), bounds)
        return hashlib.sha256(_joined(*parts)).digest()

    @cached_property
    def whole(self) -> Mapping[int, slice]:
        """Range of each section in the sum."""
        ends = np.cumsum((0, *self.sizes)).tolist()
        return {place: slice(*ends[place : place + 2]) for place in range(len(self.sizes))}

    def row(self, name: str) -> F64:
        """A silo's weights, one for each section."""
        column: F64 = self.weights.weights[:, self.weights.silos.index(name)]
        return column

    def places(self, name: str) -> list[int]:
        """The sections in whose sums a silo takes part, by index."""
        return [int(place) for place in np.flatnonzero(self.row(name))]

    def sections(self, name: str) -> dict[int, slice]:
        """Range of each section in the vector that a silo sends."""
        found, offset = dict[int, slice](), 0
        for place in self.places(name):
            found[place] = slice(offset, offset + self.sizes[place])
            offset += self.sizes[place]
        return found

    def size(self, name: str) -> int:
        """Length of the vector that a silo sends."""
        return sum(self.sizes[place] for place in self.places(name))

    def own_mask(self, name: str, seed: bytes, *, sign: int) -> Mask:
        """A silo's own mask; rows have none."""
        return Mask(_derived(seed, "own mask", self.context), sign, self._places(name, rows=False))

    def pair_mask(self, key: X25519PrivateKey, name: str, other: str, *, sign: int) -> Mask:
        """The mask of silo ``name``, whose mask ``key`` or the other's it is, for another silo.

        Only branches in whose sums both take part have it.
        """
        own = key.public_key().public_bytes_raw() == public_key(self.keys, name, 0).public_bytes_raw()
        shared = _exchanged(key, public_key(self.keys, other if own else name, 0))
        return self._pair(shared, "pair mask", name, other, sign, rows=False)

    def row_mask(self, seal_key: X25519PrivateKey, name: str, other: str) -> Mask:
        """The mask of silo ``name``, whose key of sealed shares it is, for another silo in rows of both.

        Nobody reveals that key. So the sum of a row is known if all of its silos are in it, or not at all: with a silo
        that dropped out, another one could be left alone in a row.
        """
        shared = _exchanged(seal_key, public_key(self.keys, other, 1))
        return self._pair(shared, "row mask", name, other, 1, rows=True)

    def _pair(self, shared: bytes, label: str, name: str, other: str, sign: int, *, rows: bool) -> Mask:
        first = self.weights.silos.index(name) < self.weights.silos.index(other)
        places = self._places(name, rows=rows) & self._places(other, rows=rows)
        return Mask(_derived(shared, label, self.context), sign if first else -sign, places)

    def _places(self, name: str, *, rows: bool) -> frozenset[int]:
        return frozenset(place for place in self.places(name) if (place >= self.first_row) is rows)

    def whole_rows(self, silos: Collection[str]) -> list[int]:
        """The rows, by index, of which all silos are among the given ones."""
        there = np.isin(self.weights.silos, list(silos))
        rows = ((place, self.weights.weights[place] > 0) for place in range(self.first_row, len(self.sizes)))
        return [place for place, row in rows if row.any() and there[row].all()]


def add_masks(total: U32, sections: Mapping[int, slice], masks: Iterable[Mask]) -> None:
    """Add masks in ranges of a vector, by section; a section has the same mask at both silos, wherever it lies there.

    All masks are added to a block before the next one, so that each number is read from memory once.
    """
    stream = bytearray(4 * _BLOCK + 15)  # the cipher wants room for one more block
    mask, masks = np.frombuffer(stream, "<u4", _BLOCK), tuple(masks)
    for place, where in sections.items():
        counter = modes.CTR(place.to_bytes(4, "big") + bytes(12))
        ciphers = [
            (Cipher(algorithms.AES256(each.key), counter).encryptor(), np.add if each.sign > 0 else np.subtract)
            for each in masks
            if place in each.places
        ]
        values = total[where]
        for start in range(0, len(values), _BLOCK):
            block = values[start : start + _BLOCK]
            zeros, stream_of_block = _ZEROS[: 4 * len(block)], mask[: len(block)]
            for cipher, change in ciphers:
                cipher.update_into(zeros, stream)
                change(block, stream_of_block, out=block)


def fixed_point(change: F32, weight: float, largest: float, out: U32) -> None:
    """Write a weighted change [n] in steps of ``largest`` / 2^30, modulo 2^32; weight and changes are within bounds."""
    steps, result = np.empty(_BLOCK), out.view(np.int32)
    for start in range(0, len(change), _BLOCK):
        block = change[start : start + _BLOCK]
        np.multiply(block, weight * (STEPS / largest), out=steps[: len(block)], dtype=np.float64)
        result[start : start + _BLOCK] = np.rint(steps[: len(block)], out=steps[: len(block)])


def decoded(total: U32, largest: float) -> F64:
    """The numbers of a sum without masks.

    Raises:
        RemoteWireError: one is larger than ``largest``, as in a sum of silos that were told different things.
    """
    result: F64 = total.view(np.int32).astype(np.float64) * (largest / STEPS)
    if result.size and max(-result.min(), result.max()) > largest * (1 + 1e-6):
        raise refused("the sum is out of range: a silo sent, or was sent, something else than the others")
    return result


# ------------------------------------------------------------------------------------------------------ shares
def split(secret: bytes, shares: int, least: int) -> list[bytes]:
    """Shares of a seed, of which any ``least`` give it and fewer say nothing about it (Shamir 1979)."""
    return [share for _, share in Shamir.split(least, shares, secret)]


def combined(shares: Mapping[int, bytes]) -> bytes:
    """The seed of at least as many shares as it needs, each by its place from 0.

    ``Shamir.combine`` gives the same, but finds the coefficients again for each secret, which takes most of its time.
    """
    terms = (factor * _Element(shares[place]) for place, factor in _coefficients(tuple(shares)).items())
    return reduce(_Element.__add__, terms).encode()


@lru_cache(maxsize=4)
def _coefficients(places: tuple[int, ...]) -> Mapping[int, _Element]:
    """The factors of shares in the polynomial's value at 0 (Lagrange), by place."""
    found = dict[int, _Element]()
    for place in places:
        numerator, denominator, own = _Element(1), _Element(1), _Element(place + 1)
        for other in (_Element(each + 1) for each in places if each != place):
            numerator, denominator = numerator * other, denominator * (own + other)
        found[place] = numerator * denominator.inverse()
    return found


def share_context(run: str, version: int, roster: str, keys: SumKeys) -> bytes:
    """What binds sealed shares to their round and its silos."""
    return _joined(run, version, roster, digest(keys))


def seal_share(key: X25519PrivateKey, to: X25519PublicKey, context: bytes, ends: tuple[str, str], share: bytes) -> U8:
    """A silo's shares, which only their receiver can open; ``ends`` are sender and receiver."""
    sealing, nonce = AESGCM(_derived(_exchanged(key, to), "share", _joined(context, *ends))), secrets.token_bytes(12)
    return _bytes(nonce + sealing.encrypt(nonce, share, None))


def open_share(
    key: X25519PrivateKey, sender: X25519PublicKey, context: bytes, ends: tuple[str, str], sealed: U8
) -> tuple[bytes, bytes]:
    """The receiver's shares of the sender's own seed and of the seed of its key.

    Raises:
        RemoteWireError: they were not sealed by the sender for the receiver in this round.
    """
    raw = sealed.tobytes()
    opening = AESGCM(_derived(_exchanged(key, sender), "share", _joined(context, *ends)))
    try:
        share = opening.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], None)
    except InvalidTag:
        raise refused(f"shares that {ends[0]} did not seal for {ends[1]} in this round") from None
    return share[:SEED_BYTES], share[SEED_BYTES:]


# ------------------------------------------------------------------------------------------------------ rules
def check_weights(weights: SumWeights, keys: SumKeys, name: str, sections: Sequence[str]) -> None:
    """Check the form of a sum's weights at silo ``name``.

    Raises:
        RemoteWireError: they are of other silos or sections, or no weights.
    """
    if not set(weights.silos) <= set(keys.silos) or name not in weights.silos:
        raise refused("weights of silos without keys in this round, or without this silo")
    if weights.branches != tuple(sections) or weights.weights.shape != (len(sections), len(weights.silos)):
        raise refused("weights of other branches or rows than the method's")
    if weights.weights.min() < 0 or weights.weights.sum(axis=1).max() > 1 + 1e-9:
        raise refused("weights below 0, or with a sum above 1")


def check_policy(
    weights: SumWeights,
    options: SecureAggregation,
    least: int,
    first_row: int,
    ratios: Sequence[float],
    left: Survivors | None = None,
) -> None:
    """Check that a sum, or what is left of it after silos dropped out, shows no single silo's update.

    Rows need no check after dropouts: the sum of a row has all of its silos, or is not known.

    Args:
        weights: of the sum.
        options: the limits.
        least: number of silos that the sum needs.
        first_row: index of the first section that is a row.
        ratios: largest ratio of two silos' own factors in each section, see :func:`singles_out`.
        left: the silos that did not drop out; None before the masked updates.

    Raises:
        RemoteWireError: it has too few silos, or weights that single one out.
    """
    silos = weights.silos if left is None else left.silos
    if not set(silos) <= set(weights.silos):
        raise refused("survivors that are not in the sum")
    if len(silos) < least:
        raise refused(f"a sum of {len(silos)} silos, allowed: at least {least} of this round's")
    kept = np.isin(weights.silos, silos)
    checked = len(weights.branches) if left is None else first_row
    for branch, row, ratio in zip(weights.branches[:checked], weights.weights, ratios, strict=False):
        if (wrong := singles_out(row * kept, options, ratio)) is not None:
            raise refused(f"a sum of {branch} with {wrong}")
