"""A silo's part in secure sums: it keeps its update, and sends its masked update and shares of secrets instead.

Everything but the update follows from the request and from one secret on the silo's disk, so a silo that was restarted
continues where it was; the update it computes again. :class:`silos.program.AgreedSchedule` has it answer one list of
keys, of weights and of survivors in each round, also over restarts: never two sums of the same update, and never both
kinds of shares of a silo.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedmq.config.resolve import ResolvedRun
from fedmq.errors import InputError, RemoteWireError, RunError
from fedmq.federation.protocol import SiloFacts
from fedmq.federation.updates import read_only
from fedmq.profiling import span
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder, make_folder, write_atomically
from fedmq.wire import secure_sum
from fedmq.wire.keys import Identity
from fedmq.wire.layout import Layout
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Message
from fedmq.wire.payloads import (
    F32,
    Delta,
    MaskedUpdate,
    PartialDelta,
    Payload,
    RevealedShares,
    SealedShares,
    SumKeys,
    SumWeights,
    Survivors,
)
from fedmq.wire.secure_sum import RoundSecrets, Sum, refused
from protocols.parts import aggregation
from protocols.parts.missing_branch import completed

_SECRET_BYTES = 32
_ALLOWED = f"a file of {_SECRET_BYTES} bytes; without it the silo makes a new one"


def _kept_secret(path: Path) -> bytes:
    """The silo's secret of this run: random, in a file that only its owner can read."""
    if not path.exists():
        make_folder(path.parent)

        def write(temporary: Path) -> None:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_SECRET_BYTES))

        write_atomically(path, write, durable=True)
    found = read_regular(path, _ALLOWED, _SECRET_BYTES)
    if len(found) != _SECRET_BYTES:
        raise InputError(str(path), f"{len(found)} bytes", _ALLOWED)
    return found


class SecureSums:
    """A silo's secrets, and the update that it keeps for the sum of the present round.

    Raises:
        InputError: the key of a silo of the run is not accepted here, or the file of its secret is damaged.
    """

    def __init__(
        self,
        run: ResolvedRun,
        identity: Identity,
        accepted: Mapping[str, Ed25519PublicKey],  # accepted public keys
        keys: Path,  # their folder, for the error
        out: Path,  # folder of the silo's state
        log: MessageLog,
    ) -> None:
        options = run.scenario.privacy.secure_aggregation
        assert options is not None  # noqa: S101 - made only for runs with secure aggregation
        self._options, self._run, self._identity, self._accepted, self._log = options, run.id, identity, accepted, log
        self._roster = secure_sum.roster_digest(str(keys), accepted, run.scenario.silo_names)
        self._secret = _kept_secret(RunFolder(out).silo_state(identity.name) / "sums.key")
        self._kept: tuple[int, F32] | None = None  # version and whole update float32 [P]

    def _own(self, version: int) -> RoundSecrets:
        return RoundSecrets.derive(self._secret, self._run, version)

    def withhold(
        self, version: int, payloads: tuple[Payload, ...], layout: Layout, silo: SiloFacts
    ) -> tuple[Payload, ...]:
        """Keep the update of a reply to a task of a version, and report on it instead.

        Raises:
            RunError: a parameter changes by more than ``privacy.secure_aggregation.range``, or not to a finite number.
        """
        sent: list[Payload] = []
        for payload in payloads:
            if not isinstance(payload, Delta | PartialDelta):
                sent.append(payload)
                continue
            whole = completed(payload, layout, None, silo)
            assert isinstance(whole, Delta)  # noqa: S101 - methods whose merge adds a sum share the whole model
            if not payload.largest <= (most := self._options.range):
                raise RunError(
                    f"an update that changes a parameter by {payload.largest:.3g}, allowed: at most {most:g}, "
                    "privacy.secure_aggregation.range"
                )
            change = np.asarray(whole.buffer)
            self._kept, tensor = (version, change), read_only(change)
            trained = [
                name
                for name, part in aggregation.branch_slices(layout).items()
                if aggregation.trained(tensor, part, aggregation.owns(silo, name))
            ]
            own = self._own(version)
            sent.append(
                secure_sum.report(self._identity, own, self._run, version, self._roster, payload.n_samples, trained)
            )
        return tuple(sent)

    @span("compute")
    def respond(self, message: Message, layout: Layout) -> tuple[Payload, ...]:
        """The payloads of the answer to a step of a secure sum.

        Raises:
            RemoteWireError: the request breaks a rule of secure sums; the log says so.
        """
        version = message.header.base_version
        try:
            match message.payloads:
                case (SumKeys() as keys,):
                    self._check_keys(version, keys)
                    return (self._shares(version, keys),)
                case (SumKeys() as keys, SumWeights() as weights):
                    return (self._masked(self._sum(version, keys, weights, layout), layout),)
                case (SumKeys() as keys, SumWeights() as weights, Survivors() as left, SealedShares() as shares):
                    return (self._revealed(self._sum(version, keys, weights, layout), left, shares),)
            raise refused("a step of a secure sum with other payloads")
        except RemoteWireError as error:
            self._log.refused(COORDINATOR, error.reason, error.detail, 0)
            raise

    def _check_keys(self, version: int, keys: SumKeys) -> None:
        """Check that the keys of a round are those that accepted silos and this one signed for it."""
        name, own = self._identity.name, self._own(version)
        if len(keys.silos) < 2 or not len(keys.keys) == len(keys.commitments) == len(keys.signatures) == len(
            keys.silos
        ):
            raise refused("keys of less than two silos, or not one of each kind for each silo")
        for place, silo in enumerate(keys.silos):
            if silo not in self._accepted:
                raise refused(f"keys of {silo}, whose public key is not accepted here")
            key, parts = self._accepted[silo], (keys.keys[place], keys.commitments[place], keys.signatures[place])
            secure_sum.check_signature(key, self._run, version, silo, self._roster, *parts)
        if name not in keys.silos or not np.array_equal(keys.keys[keys.silos.index(name)], own.public):
            raise refused("a list of keys without those of this silo")

    def _least(self, keys: SumKeys) -> int:
        return secure_sum.needed(len(keys.silos), self._options.threshold)

    def _context(self, version: int, keys: SumKeys) -> bytes:
        return secure_sum.share_context(self._run, version, self._roster, keys)

    def _shares(self, version: int, keys: SumKeys) -> SealedShares:
        own, name, count = self._own(version), self._identity.name, len(keys.silos)
        seeds, least = (own.own_seed, own.key_seed), self._least(keys)
        shares = [
            b"".join(pair) for pair in zip(*(secure_sum.split(seed, count, least) for seed in seeds), strict=True)
        ]
        sealed = np.zeros((count, 60), np.uint8)
        for place, silo in enumerate(keys.silos):
            to, context = secure_sum.public_key(keys, silo, 1), self._context(version, keys)
            sealed[place] = secure_sum.seal_share(own.seal_key, to, context, (name, silo), shares[place])
        return SealedShares(sealed)

    def _sum(self, version: int, keys: SumKeys, weights: SumWeights, layout: Layout) -> Sum:
        """What the silos of a sum agree on."""
        self._check_keys(version, keys)
        branches = aggregation.branch_sizes(layout)
        if weights.layout_digest != layout.digest:
            raise refused("weights for another layout")
        secure_sum.check_weights(weights, keys, self._identity.name, tuple(branches))
        secure_sum.check_policy(weights, self._options, self._least(keys))
        return Sum(self._run, version, self._roster, keys, weights, tuple(branches.values()))

    def _masked(self, agreed: Sum, layout: Layout) -> MaskedUpdate:
        name, own = self._identity.name, self._own(agreed.version)
        if self._kept is None or self._kept[0] != agreed.version:
            raise refused("a masked update of a round in which this silo has trained nothing")
        change, sections, row = self._kept[1], agreed.sections(name), agreed.row(name)
        total = np.empty(agreed.size(name), np.uint32)
        for place, where in sections.items():
            start = agreed.offsets[place]
            values = change[start : start + agreed.sizes[place]]
            total[where] = secure_sum.fixed_point(values, float(row[place]), self._options.range)
        agreed.add_own(total, sections, own.own_seed, sign=1)
        for other in agreed.weights.silos:
            if other != name:
                agreed.add_pair(total, sections, own.mask_key, name, other, sign=1)
        return MaskedUpdate(layout.digest, total)

    def _revealed(self, agreed: Sum, left: Survivors, sealed: SealedShares) -> RevealedShares:
        name, own, keys = self._identity.name, self._own(agreed.version), agreed.keys
        secure_sum.check_policy(agreed.weights, self._options, self._least(keys), left)
        if name not in left.silos or len(sealed.sealed) != len(keys.silos):
            raise refused("shares of a sum that this silo's update is not in, or not one for each silo")
        shares = list[bytes]()
        for silo in agreed.weights.silos:
            place, context = keys.silos.index(silo), self._context(agreed.version, keys)
            sender = secure_sum.public_key(keys, silo, 1)
            of_seed, of_key = secure_sum.open_share(own.seal_key, sender, context, (silo, name), sealed.sealed[place])
            # One kind only: with both, the sum would show what this silo sent.
            shares.append(of_seed if silo in left.silos else of_key)
        return RevealedShares(np.frombuffer(b"".join(shares), np.uint8).reshape(-1, secure_sum.SEED_BYTES).copy())
