"""A silo's part in secure sums: it keeps its update, and sends its masked update and shares of secrets instead.

Everything but the update follows from the request and from one secret on the silo's disk, so a silo that was restarted
continues where it was; the update it computes again. :class:`silos.program.AgreedSchedule` has it answer one list of
keys, of weights and of survivors in each round, also over restarts: never two sums of the same update, and never both
kinds of shares of a silo.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedmq.config.privacy import Privacy
from fedmq.config.resolve import ResolvedRun
from fedmq.errors import InputError, RemoteWireError, RunError
from fedmq.federation.noise import CLIP_BIT, noise_of, normal
from fedmq.federation.protocol import SiloFacts
from fedmq.federation.sums import Scales, SumLayout, rows_of, scales
from fedmq.federation.updates import read_only
from fedmq.profiling import span
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder, make_folder, write_atomically
from fedmq.wire import secure_sum
from fedmq.wire.codec import digest
from fedmq.wire.keys import Identity, noise_key
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Message
from fedmq.wire.payloads import (
    F32,
    I64,
    Delta,
    MaskedUpdate,
    PartialDelta,
    Payload,
    RevealedShares,
    SealedShares,
    SumKeys,
    SumWeights,
    Survivors,
    tensors,
)
from fedmq.wire.secure_sum import RoundSecrets, Sum, refused
from protocols.parts import aggregation
from protocols.parts.aggregation import completed

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


@dataclass(frozen=True)
class _Kept:
    """What a silo keeps for the sum of a round, and its part in each section, by name."""

    version: int
    values: Mapping[str, F32]
    holds: Mapping[str, bool]  # whether it has something to add to the section
    trained: tuple[str, ...]  # branches that it changes
    samples: int  # that the update was trained on
    support: I64  # samples behind each row [C]
    privacy: Privacy  # the scenario's options, with the clipping norm of the round


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
        self._options, self._run, self._identity, self._log = options, run.id, identity, log
        self._privacy = run.scenario.privacy
        self._noise = noise_key(identity) if self._privacy.noise_from == "key" else run.scenario.seed
        self._accepted = {**accepted, identity.name: identity.key.public_key()}  # a site need not accept its own key
        self._roster = secure_sum.roster_digest(str(keys), self._accepted, run.scenario.silo_names)
        self._secret = _kept_secret(RunFolder(out).silo_state(identity.name) / "sums.key")
        self._kept: _Kept | None = None
        self._checked = 0, ""  # version and digest of the list of keys that was checked last

    def _own(self, version: int) -> RoundSecrets:
        return RoundSecrets.derive(self._secret, self._run, version)

    def withhold(
        self, version: int, payloads: tuple[Payload, ...], layout: SumLayout, silo: SiloFacts, privacy: Privacy
    ) -> tuple[Payload, ...]:
        """Keep the parts of a reply that go through the sum, and report on them instead.

        The reply is clipped but without noise; the version is that of the model that the silo trained. ``privacy`` has
        the clipping norm of this round.

        Raises:
            RunError: a value is not finite, or larger than a sum allows.
        """
        kept = self._kept = self._split(version, payloads, layout, silo, privacy)
        own = self._own(version)
        report = secure_sum.report(
            self._identity, own, self._run, version, self._roster, kept.samples, kept.trained, kept.support
        )
        signed = {name: getattr(report, name).tobytes().hex() for name in ("keys", "commitment", "signature")}
        through = ", ".join([*(each.KIND for each in payloads if type(each) in layout.kinds), *layout.bit * [CLIP_BIT]])
        self._log.note(LogEvent.SUM_KEYS, version=version, roster=report.roster, through=through, **signed)
        return report, *(payload for payload in payloads if type(payload) not in layout.kinds)

    def _split(
        self, version: int, payloads: tuple[Payload, ...], layout: SumLayout, silo: SiloFacts, privacy: Privacy
    ) -> _Kept:
        values, holds, trained, samples = dict[str, F32](), dict[str, bool](), list[str](), 0
        support = {kind: np.zeros(rows.count, np.int64) for kind, rows in layout.rows.items()}
        for payload in (each for each in payloads if type(each) in layout.kinds):
            if isinstance(payload, Delta | PartialDelta):
                whole = completed(payload, layout.layout, layout.layers, silo)
                assert isinstance(whole, Delta | PartialDelta)  # noqa: S101 - completing a change gives one
                change, samples = np.asarray(whole.buffer), payload.n_samples
                for name, part in layout.branches.items():
                    values[name], holds[name] = change[part], aggregation.owns(silo, name)
                    if aggregation.trained(read_only(change), part, holds[name]):
                        trained.append(name)
                if layout.bit:
                    short = float(np.linalg.norm(change.astype(np.float64))) < (privacy.clip_norm or 0.0) * (1 - 1e-6)
                    values[CLIP_BIT], holds[CLIP_BIT] = np.array([0.5 if short else -0.5], np.float32), True
            if type(payload) in layout.changes:
                values[payload.KIND], holds[payload.KIND] = tensors(payload)[0], True
            if type(payload) in layout.rows:
                rows, support[type(payload)] = rows_of(payload)
                names = layout.row_names(type(payload))
                for name, row, count in zip(names, rows, support[type(payload)], strict=True):
                    values[name], holds[name] = row, bool(count)
        for name, most, kind in zip(
            layout.sizes, layout.bounds(self._options.range), layout.section_kinds, strict=True
        ):
            if (noise := noise_of(kind, privacy)) is not None and noise.noise_multiplier:
                continue  # the clipping norm bounds it
            section = values[name] if holds.get(name) else np.zeros(0, np.float32)
            found = float(np.max([-section.min(initial=0.0), section.max(initial=0.0)]))
            if not found <= most:
                what = f"an update that changes a parameter by {found:.3g}, allowed: at most {most:g}, "
                what += "privacy.secure_aggregation.range"
                if name not in list(layout.sizes)[: layout.first_held]:  # the method bounds its rows
                    what = f"a row {name} with a value of {found:.3g}, allowed: at most {most:g}"
                raise RunError(what)
        counts = [*support.values(), np.zeros(0, np.int64)]
        return _Kept(version, values, holds, tuple(trained), samples, np.concatenate(counts), privacy)

    @span("compute")
    def respond(self, message: Message, layout: SumLayout) -> tuple[Payload, ...]:
        """The payloads of the answer to a step of a secure sum.

        Raises:
            RemoteWireError: the request breaks a rule of secure sums; the log says so.
        """
        version = message.header.base_version
        try:
            match message.payloads:
                case (SumKeys() as keys,):
                    self._check_keys(version, keys)
                    self._log.note(LogEvent.SUM_SILOS, version=version, silos=", ".join(keys.silos))
                    return (self._shares(version, keys),)
                case (SumKeys() as keys, SumWeights() as weights):
                    return (self._masked(self._sum(version, keys, weights, layout), layout),)
                case (SumKeys() as keys, SumWeights() as weights, Survivors() as left, SealedShares() as shares):
                    return (self._revealed(self._sum(version, keys, weights, layout), left, shares, layout.ratios),)
            raise refused("a step of a secure sum with other payloads")
        except RemoteWireError as error:
            self._log.refused(COORDINATOR, error.reason, error.detail, 0)
            raise

    def _check_keys(self, version: int, keys: SumKeys) -> None:
        """Check that the keys of a round are those that accepted silos and this one signed for it; once for a list."""
        name, own = self._identity.name, self._own(version)
        if self._checked == (checked := (version, digest(keys))):
            return
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
        self._checked = checked

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
        sealed, context = np.zeros((count, 60), np.uint8), self._context(version, keys)
        for place, silo in enumerate(keys.silos):
            to = secure_sum.public_key(keys, silo, 1)
            sealed[place] = secure_sum.seal_share(own.seal_key, to, context, (name, silo), shares[place])
        return SealedShares(sealed)

    def _sum(self, version: int, keys: SumKeys, weights: SumWeights, layout: SumLayout) -> Sum:
        """What the silos of a sum agree on."""
        self._check_keys(version, keys)
        if weights.layout_digest != layout.layout.digest:
            raise refused("weights for another layout")
        secure_sum.check_weights(weights, keys, self._identity.name, tuple(layout.sizes))
        secure_sum.check_policy(weights, self._options, self._least(keys), layout.first_row, layout.ratios)
        sizes, bounds = tuple(layout.sizes.values()), self._scales(version, keys, weights, layout).bounds
        return Sum(self._run, version, self._roster, keys, weights, sizes, bounds, layout.first_row)

    def _scales(self, version: int, keys: SumKeys, weights: SumWeights, layout: SumLayout) -> Scales:
        kept = self._kept
        privacy = self._privacy if kept is None or kept.version != version else kept.privacy
        return scales(layout, privacy, weights.weights, self._least(keys))

    def _masked(self, agreed: Sum, layout: SumLayout) -> MaskedUpdate:
        name, own, kept = self._identity.name, self._own(agreed.version), self._kept
        if kept is None or kept.version != agreed.version:
            raise refused("a masked update of a round in which this silo has trained nothing")
        sections, row = agreed.sections(name), agreed.row(name)
        sent = self._scales(agreed.version, agreed.keys, agreed.weights, layout)
        total = np.empty(agreed.size(name), np.uint32)
        for place, where in sections.items():
            section = agreed.weights.branches[place]
            if not kept.holds.get(section):
                # Its zeros would only make the sum look like one of more silos than it is.
                raise refused(f"a weight in the sum of {section}, to which this silo has nothing to add")
            weight, bound = float(row[place]) * sent.factors[place], sent.bounds[place]
            secure_sum.fixed_point(kept.values[section], weight, bound, total[where])
            if share := sent.shares[place]:
                drawn = normal(self._noise, (name, agreed.version, "sum", section), total[where])
                drawn *= share * (secure_sum.STEPS / bound)
                total[where] += np.rint(drawn, out=drawn).astype(np.int32).view(np.uint32)
        masks = [agreed.own_mask(name, own.own_seed, sign=1)]
        for other in agreed.weights.silos:
            if other != name:
                masks.append(agreed.pair_mask(own.mask_key, name, other, sign=1))
                masks += [agreed.row_mask(own.seal_key, name, other)] if agreed.first_row < len(agreed.sizes) else []
        secure_sum.add_masks(total, sections, masks)
        return MaskedUpdate(layout.layout.digest, total)

    def _revealed(self, agreed: Sum, left: Survivors, sealed: SealedShares, ratios: Sequence[float]) -> RevealedShares:
        name, own, keys = self._identity.name, self._own(agreed.version), agreed.keys
        secure_sum.check_policy(agreed.weights, self._options, self._least(keys), agreed.first_row, ratios, left)
        if name not in left.silos or len(sealed.sealed) != len(keys.silos):
            raise refused("shares of a sum that this silo's update is not in, or not one for each silo")
        shares, context = list[bytes](), self._context(agreed.version, keys)
        for silo in agreed.weights.silos:
            place, sender = keys.silos.index(silo), secure_sum.public_key(keys, silo, 1)
            of_seed, of_key = secure_sum.open_share(own.seal_key, sender, context, (silo, name), sealed.sealed[place])
            # One kind only: with both, the sum would show what this silo sent.
            shares.append(of_seed if silo in left.silos else of_key)
        revealed = np.frombuffer(b"".join(shares), np.uint8).reshape(-1, secure_sum.SEED_BYTES)
        return RevealedShares(revealed.copy())
