"""Mutated frames against everything that reads a peer's bytes: header, handshake, sealed message, body, payloads.

    python -m benchmarks.fuzz_frames --count 1000000 --state fuzz.json

Each frame is made from a golden frame of ``tests/frames``, of every message and payload kind and wire version, and is
determined by the seed and its number: ``--first N --count 1`` repeats frame N. A reader may only accept a frame or
raise ``RemoteWireError``; anything else is a crash. With ``--roster``, the frames go to a real coordinator's end, one
after the other, and its rate limits are checked (:mod:`benchmarks.fuzz_roster`).

Ctrl-C stops; with ``--state`` the command continues where it stopped. Exit code 1 after a crash, a frame that took over
2 s, or more than 200 MB above the memory at the start.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.fuzz_mutations import golden_messages, mutated_body, mutated_bytes, mutated_msgpack
from benchmarks.fuzz_roster import RosterReaders
from fedmq import seeds
from fedmq.errors import RemoteWireError
from fedmq.wire import codec, handshake, rekeying
from fedmq.wire.key_agreement import Ephemeral
from fedmq.wire.keys import Identity
from fedmq.wire.messages import COORDINATOR, Header, Kind
from fedmq.wire.payload_digest import digest
from fedmq.wire.sealed_headers import prefix_of
from fedmq.wire.sealed_sessions import Session, open_message

#: Limits of one frame [s], and of the memory over that at the start [bytes].
SLOWEST_S, MOST_BYTES = 2.0, 200 << 20
_MAX_CRASHES = 100
_RUN = "golden-1"


class Source(Protocol):
    """Makes frames."""

    def read(self, generator: np.random.Generator) -> tuple[str, Callable[[], object]]:
        """The name of a reader, and a function that has it read a frame made for it."""


@dataclass
class Found:
    """What a campaign found so far.

    Args:
        seed: of the campaign.
        done: frames read, which is the number of the next one.
        outcomes: number of frames by reader and outcome: ``accepted``, or the reason of the refusal.
        crashes: number of the frame, reader and exception; at most 100.
        slowest: seconds and number of the slowest frame.
        memory: most resident memory over that at the start [bytes].
    """

    seed: int
    done: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: list[tuple[int, str, str]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)
    memory: int = 0

    @property
    def failed(self) -> bool:
        """Whether a limit was exceeded."""
        return bool(self.crashes) or self.slowest[0] > SLOWEST_S or self.memory > MOST_BYTES


# ----------------------------------------------------------------------------------------------------------- readers
class Readers:
    """What reads a peer's frames, each with frames that it accepts."""

    def __init__(self) -> None:
        self._keys = {name: Identity(name, Ed25519PrivateKey.generate()) for name in ("silo-00", COORDINATOR)}
        self._accepted = {name: identity.key.public_key() for name, identity in self._keys.items()}
        self._ephemeral = Ephemeral.generate()
        self._messages = golden_messages()
        self._hello, self._initiated = handshake.initiate(self._keys["silo-00"], COORDINATOR, _RUN, 0.0)
        self._welcome, _ = self._answered()
        self._kinds = {
            "header": self._header,
            "body": self._body,
            "sealed": self._sealed,
            "hello": self._hello_frames,
            "welcome": self._welcome_frames,
            "ready": self._ready,
            "short": self._short,
            "rekey": self._rekey,
        }

    def _answered(self) -> tuple[tuple[bytes, bytes], handshake.Responded]:
        return handshake.respond(
            self._keys[COORDINATOR], self._accepted, _RUN, self._hello, 0.0, ephemeral=self._ephemeral
        )

    def read(self, generator: np.random.Generator) -> tuple[str, Callable[[], object]]:
        """The name of a reader, and a function that has it read a frame made for it."""
        name = str(generator.choice(list(self._kinds), p=[0.15, 0.4, 0.15, 0.1, 0.05, 0.05, 0.07, 0.03]))
        return name, self._kinds[name](generator)

    def _message(self, generator: np.random.Generator) -> tuple[bytes, bytes]:
        return self._messages[int(generator.integers(0, len(self._messages)))]

    def _header(self, generator: np.random.Generator) -> Callable[[], object]:
        clear = mutated_msgpack(self._message(generator)[0], generator)
        return lambda: codec.decode_clear(clear)

    def _body(self, generator: np.random.Generator) -> Callable[[], object]:
        clear, body = self._message(generator)
        changed = mutated_body(body, generator)

        def read() -> None:
            for payload in codec.decode(clear, changed).payloads:
                digest(payload)

        return read

    def _sealed(self, generator: np.random.Generator) -> Callable[[], object]:
        """A mutated body sealed by a peer that has the session's keys, or frames mutated after they were sealed."""
        keys = {"session": bytes(16), "send_key": bytes(32), "receive_key": bytes(32), "run": _RUN}
        sender = Session(name="silo-00", peer=COORDINATOR, **keys)  # type: ignore[arg-type]
        receiver = Session(name=COORDINATOR, peer="silo-00", **keys)  # type: ignore[arg-type]
        header = Header(run=_RUN, kind=Kind.HEARTBEAT, sender="silo-00", receiver=COORDINATOR, sequence=0, sent_at=0.0)
        body = self._message(generator)[1]
        clear, sealed = sender.seal(header, [mutated_body(body, generator)]).frames
        frames = [bytes(clear), bytes(sealed)]
        if generator.random() < 0.5:
            at = int(generator.integers(0, 2))
            frames[at] = (mutated_bytes if at else mutated_msgpack)(frames[at], generator)
        return lambda: open_message(receiver, frames)

    def _short(self, generator: np.random.Generator) -> Callable[[], object]:
        """A mutated content with a sealed header, sealed by a peer that has the session's keys."""
        receiver = Session(
            run=_RUN, name=COORDINATOR, peer="silo-00", session=bytes(16), send_key=bytes(32), receive_key=bytes(32)
        )
        header = Header(
            run=_RUN, kind=Kind.REPLY, sender="silo-00", receiver=COORDINATOR, sequence=0, reply_to=0, sent_at=0.0,
            session=bytes(16),
        )  # fmt: skip
        clear, body = codec.encode_short_header(header), self._message(generator)[1]
        whole = codec.encode_header(header)
        if generator.random() < 0.5:
            whole = mutated_msgpack(whole, generator)
        content = prefix_of(whole, len(body)) + (mutated_body(body, generator) if generator.random() < 0.5 else body)
        if generator.random() < 0.5:
            content = mutated_bytes(content, generator)
        frames = [clear, AESGCM(bytes(32)).encrypt(bytes(12), content, clear)]
        return lambda: open_message(receiver, frames)

    def _rekey(self, generator: np.random.Generator) -> Callable[[], object]:
        """A mutated rekey or its answer, half of them signed again."""
        ends = [
            Session(run=_RUN, name=me, peer=peer, session=bytes(16), send_key=bytes(32), receive_key=bytes(32))
            for me, peer in (("silo-00", COORDINATOR), (COORDINATOR, "silo-00"))
        ]
        keys, identities = self._accepted, self._keys

        def header(kind: Kind, end: Session) -> Header:
            return Header(run=_RUN, kind=kind, sender=end.name, receiver=end.peer, sequence=0, sent_at=0.0)

        asked, state = rekeying.begin(identities["silo-00"], ends[0], header(Kind.REKEY, ends[0]), self._ephemeral)
        opened = ends[1].open(asked.frames)
        answer = header(Kind.REKEYED, ends[1])
        if generator.random() < 0.5:
            body = self._resigned("silo-00", rekeying.REKEY_LABEL, (bytes(16),), bytes(opened.body), generator)
            asked_again = replace(opened, body=memoryview(body))
            return lambda: rekeying.answer(
                identities[COORDINATOR], keys["silo-00"], ends[1], asked_again, answer, self._ephemeral
            )
        answered = ends[0].open(
            rekeying.answer(identities[COORDINATOR], keys["silo-00"], ends[1], opened, answer, self._ephemeral).frames
        )
        context = bytes(16), state.body
        body = self._resigned(COORDINATOR, rekeying.REKEYED_LABEL, context, bytes(answered.body), generator)
        changed = replace(answered, body=memoryview(body))
        return lambda: rekeying.finish(state, keys[COORDINATOR], ends[0], changed)

    def _resigned(
        self, name: str, label: bytes, context: tuple[bytes, ...], body: bytes, generator: np.random.Generator
    ) -> bytes:
        signature, packed = body[: handshake.SIGNATURE_BYTES], body[handshake.SIGNATURE_BYTES :]
        packed = mutated_msgpack(packed, generator)
        if generator.random() < 0.5:
            signature = self._keys[name].key.sign(label + handshake.transcript_digest(*context, packed))
        return signature + packed

    def _signed(
        self, name: str, label: bytes, context: bytes, frames: tuple[bytes, bytes], generator: np.random.Generator
    ) -> tuple[bytes, bytes]:
        """Mutated frames of a handshake message; half of them signed again, so that their fields are read."""
        clear, body = frames
        signature, packed = body[: handshake.SIGNATURE_BYTES], body[handshake.SIGNATURE_BYTES :]
        if generator.random() < 0.5:
            clear = mutated_msgpack(clear, generator)
        else:
            packed = mutated_msgpack(packed, generator)
        if generator.random() < 0.5:
            signature = self._keys[name].key.sign(label + handshake.transcript_digest(context, clear, packed))
        return clear, signature + packed

    def _hello_frames(self, generator: np.random.Generator) -> Callable[[], object]:
        frames = self._signed("silo-00", handshake.HELLO_LABEL, b"", self._hello, generator)
        coordinator = self._keys[COORDINATOR]
        return lambda: handshake.respond(coordinator, self._accepted, _RUN, frames, 0.0, ephemeral=self._ephemeral)

    def _welcome_frames(self, generator: np.random.Generator) -> Callable[[], object]:
        context = handshake.transcript_digest(*self._hello)
        frames = self._signed(COORDINATOR, handshake.WELCOME_LABEL, context, self._welcome, generator)
        return lambda: handshake.complete(self._initiated, self._accepted, frames, 0.0)

    def _ready(self, generator: np.random.Generator) -> Callable[[], object]:
        welcome, responded = self._answered()
        ready, _ = handshake.complete(self._initiated, self._accepted, welcome, 0.0)
        frames = [bytes(frame) for frame in ready]
        at = int(generator.integers(0, 2))
        frames[at] = (mutated_bytes if at else mutated_msgpack)(frames[at], generator)
        return lambda: handshake.confirm(responded, frames)


# ---------------------------------------------------------------------------------------------------------- campaign
def fuzz(readers: Source, found: Found, until: int, stop: Callable[[], bool], report: Callable[[Found], None]) -> Found:
    """Read frames from ``found.done`` to ``until``, or until a stop; ``report`` is called every thousand."""
    process = psutil.Process()
    baseline = process.memory_info().rss
    while found.done < until and not stop():
        number = found.done
        name, read = readers.read(seeds.numpy_generator(found.seed, "fuzz", number))
        began = time.perf_counter()
        try:
            read()
            outcome = "accepted"
        except RemoteWireError as error:
            outcome = error.reason
        except Exception as error:
            outcome = "crash"
            if len(found.crashes) < _MAX_CRASHES:
                found.crashes.append((number, name, f"{type(error).__name__}: {error}"[:300]))
        found.slowest = max(found.slowest, (time.perf_counter() - began, number))
        found.outcomes[f"{name} {outcome}"] += 1
        found.done += 1
        if found.done % 1000 == 0 or found.done == until:
            found.memory = max(found.memory, process.memory_info().rss - baseline)
            report(found)
    return found


def lines_of(found: Found) -> list[str]:
    """The result in words."""
    seconds, number = found.slowest
    return [
        f"{found.done:,} frames, {len(found.crashes)} crashes",
        f"slowest {seconds * 1e3:.1f} ms (frame {number}), memory {found.memory / 2**20:.1f} MB over the start",
        *(f"  {name}: {count:,}" for name, count in sorted(found.outcomes.items())),
        *(f"  crash of {reader} at frame {at}: {what}" for at, reader, what in found.crashes),
    ]


def _saved(path: Path | None, seed: int, first: int) -> Found:
    if path is None or not path.exists():
        return Found(seed, done=first)
    plain = json.loads(path.read_text())
    crashes = [(int(at), str(reader), str(what)) for at, reader, what in plain.pop("crashes")]
    return Found(
        **{**plain, "outcomes": Counter(plain["outcomes"]), "slowest": tuple(plain["slowest"])}, crashes=crashes
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_frames", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="frames in all (100000)")
    parser.add_argument("--seed", type=int, default=0, help="of the campaign (0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first frame (0)")
    parser.add_argument("--roster", action="store_true", help="frames for a real roster; see benchmarks.fuzz_roster")
    parser.add_argument("--state", type=Path, help="file from which to continue, and where the state is kept")
    arguments = parser.parse_args()
    found, told, stopped = _saved(arguments.state, arguments.seed, arguments.first), [time.monotonic()], list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stopped.append(received))

    def report(now: Found) -> None:
        if arguments.state is not None:
            arguments.state.write_text(json.dumps(vars(now)))
        if time.monotonic() - told[0] > 2:
            told[0] = time.monotonic()
            print(f"{now.done:,} of {arguments.first + arguments.count:,}, {len(now.crashes)} crashes", file=sys.stderr)

    with RosterReaders() if arguments.roster else nullcontext(Readers()) as readers:
        found = fuzz(readers, found, arguments.first + arguments.count, lambda: bool(stopped), report)
    print("\n".join(lines_of(found)))
    sys.exit(1 if found.failed or stopped else 0)


if __name__ == "__main__":
    main()
