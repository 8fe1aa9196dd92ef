"""Damaged frames for everything that reads a peer's bytes: header, handshake, sealed message, body, payloads.

Each is made from a golden frame of ``tests/frames``, of every kind of message and payload. :func:`frames` is a strategy
of readers with a frame made for them. A reader may accept it or raise ``RemoteWireError``.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import strategies as st

from fedmq.errors import RemoteWireError
from fedmq.wire import codec, handshake
from fedmq.wire.codec import digest
from fedmq.wire.key_agreement import REKEY_LABEL, REKEYED_LABEL, Ephemeral, answer_rekey, begin_rekey, finish_rekey
from fedmq.wire.keys import Identity
from fedmq.wire.messages import COORDINATOR, Header, Kind
from fedmq.wire.sessions import Session, open_message, prefix_of
from tests.damaged_files import STRANGE, damaged_bytes, replaced

_FRAMES = Path(__file__).parent / "frames"
_RUN = "golden-1"
_STRANGE: tuple[Any, ...] = (
    *(value for value in STRANGE if value not in (2**70, "\ud800")),  # msgpack has no such values
    *(1, 3, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), -1.0, math.inf, "a" * 300, "\u202e\x1b[2J", "float32", "complex128"),
    *("uint8", "hello", b"", bytes(16), bytes(33), [0], [1 << 40], [2, 1 << 62], ["float32", [1 << 30]]),
)
#: What reads a peer's frames.
READERS = ("header", "body", "sealed", "hello", "welcome", "ready", "short", "shared", "rekey")


@cache
def golden_messages() -> list[tuple[bytes, bytes]]:
    """Unencrypted header and body of each golden message."""
    stored = [json.loads(path.read_text()) for path in sorted(_FRAMES.glob("*.json"))]
    return [(bytes.fromhex(each["clear"]), bytes.fromhex(each["body"])) for each in stored if "body" in each]


def damaged_msgpack(raw: bytes, draw: random.Random) -> bytes:
    """Packed data with changed bytes or, as often, with another value somewhere in it."""
    if draw.randrange(2):
        return damaged_bytes(raw, draw)
    try:
        return bytes(msgpack.packb(replaced(msgpack.unpackb(raw), draw, _STRANGE), use_bin_type=True))
    except ValueError:  # nested too deeply
        return damaged_bytes(raw, draw)


def damaged_body(raw: bytes, draw: random.Random) -> bytes:
    """A body with changed bytes, or with a changed msgpack part of the right length before the same tensors."""
    if draw.randrange(5) < 2:
        return damaged_bytes(raw, draw)
    end = 4 + int.from_bytes(raw[:4], "little")
    head = damaged_msgpack(raw[4:end], draw)
    tensors = raw[end + -end % codec.ALIGNMENT :]
    padding = bytes(-(4 + len(head)) % codec.ALIGNMENT) if tensors else b""
    return len(head).to_bytes(4, "little") + head + padding + tensors


class Readers:
    """What reads a peer's frames, each with frames that it accepts."""

    def __init__(self) -> None:
        self._keys = {name: Identity(name, Ed25519PrivateKey.generate()) for name in ("silo-00", COORDINATOR)}
        self._accepted = {name: identity.key.public_key() for name, identity in self._keys.items()}
        self._ephemeral = Ephemeral.generate()
        self._messages = golden_messages()
        self._hello, self._initiated = handshake.initiate(self._keys["silo-00"], COORDINATOR, _RUN, 0.0)
        self._welcome, _ = self._answered()
        self._kinds: Mapping[str, Callable[[random.Random], Callable[[], object]]] = {
            "header": self._header,
            "body": self._body,
            "sealed": self._sealed,
            "hello": self._hello_frames,
            "welcome": self._welcome_frames,
            "ready": self._ready,
            "short": self._short,
            "shared": self._shared,
            "rekey": self._rekey,
        }

    def _answered(self) -> tuple[tuple[bytes, bytes], handshake.Responded]:
        return handshake.respond(
            self._keys[COORDINATOR], self._accepted, _RUN, self._hello, 0.0, ephemeral=self._ephemeral
        )

    def reader(self, name: str, draw: random.Random) -> Callable[[], object]:
        """A function that has a reader read a frame made for it."""
        return self._kinds[name](draw)

    def _message(self, draw: random.Random) -> tuple[bytes, bytes]:
        return draw.choice(self._messages)

    def _header(self, draw: random.Random) -> Callable[[], object]:
        clear = damaged_msgpack(self._message(draw)[0], draw)
        return lambda: codec.decode_clear(clear)

    def _body(self, draw: random.Random) -> Callable[[], object]:
        clear, body = self._message(draw)
        changed = damaged_body(body, draw)

        def read() -> None:
            for payload in codec.decode(clear, changed).payloads:
                digest(payload)

        return read

    def _sealed(self, draw: random.Random) -> Callable[[], object]:
        """A damaged body sealed by a peer that has the session's keys, or frames damaged after they were sealed."""
        keys = {"session": bytes(16), "send_key": bytes(32), "receive_key": bytes(32), "run": _RUN}
        sender = Session(name="silo-00", peer=COORDINATOR, **keys)  # type: ignore[arg-type]
        receiver = Session(name=COORDINATOR, peer="silo-00", **keys)  # type: ignore[arg-type]
        header = Header(run=_RUN, kind=Kind.HEARTBEAT, sender="silo-00", receiver=COORDINATOR, sequence=0, sent_at=0.0)
        body = self._message(draw)[1]
        clear, sealed = sender.seal(header, [damaged_body(body, draw)]).frames
        frames = [bytes(clear), bytes(sealed)]
        if draw.randrange(2):
            at = draw.randrange(2)
            frames[at] = (damaged_bytes if at else damaged_msgpack)(frames[at], draw)
        return lambda: open_message(receiver, frames)

    def _short(self, draw: random.Random) -> Callable[[], object]:
        """A damaged content with a sealed header, sealed by a peer that has the session's keys."""
        receiver = Session(
            run=_RUN, name=COORDINATOR, peer="silo-00", session=bytes(16), send_key=bytes(32), receive_key=bytes(32)
        )
        header = Header(
            run=_RUN, kind=Kind.REPLY, sender="silo-00", receiver=COORDINATOR, sequence=0, reply_to=0, sent_at=0.0,
            session=bytes(16),
        )  # fmt: skip
        clear, body = codec.encode_short_header(header), self._message(draw)[1]
        whole = codec.encode_header(header)
        if draw.randrange(2):
            whole = damaged_msgpack(whole, draw)
        content = prefix_of(whole, len(body)) + (damaged_body(body, draw) if draw.randrange(2) else body)
        if draw.randrange(2):
            content = damaged_bytes(content, draw)
        frames = [clear, AESGCM(bytes(32)).encrypt(bytes(12), content, clear)]
        return lambda: open_message(receiver, frames)

    def _shared(self, draw: random.Random) -> Callable[[], object]:
        """A damaged content before a shared part, sealed by a peer that has the session's keys."""
        stored = json.loads((_FRAMES / "v1-shared.json").read_text())
        clear, sealed, part = (bytes.fromhex(frame) for frame in stored["whole"])
        key, nonce, session = bytes.fromhex(stored["key"]), b"\0\0\0\1" + bytes(8), codec.decode_header(clear).session
        content = damaged_bytes(AESGCM(key).decrypt(nonce, sealed, clear), draw)
        if draw.randrange(3) == 0:
            part = damaged_bytes(part, draw)
        frames = [clear, AESGCM(key).encrypt(nonce, content, clear), part]
        receiver = Session(
            run=_RUN, name="silo-00", peer=COORDINATOR, session=session, send_key=bytes(32), receive_key=key
        )
        return lambda: open_message(receiver, frames)

    def _rekey(self, draw: random.Random) -> Callable[[], object]:
        """A damaged rekey or its answer, half of them signed again."""
        ends = [
            Session(run=_RUN, name=me, peer=peer, session=bytes(16), send_key=bytes(32), receive_key=bytes(32))
            for me, peer in (("silo-00", COORDINATOR), (COORDINATOR, "silo-00"))
        ]
        keys, identities = self._accepted, self._keys

        def header(kind: Kind, end: Session) -> Header:
            return Header(run=_RUN, kind=kind, sender=end.name, receiver=end.peer, sequence=0, sent_at=0.0)

        asked, state = begin_rekey(identities["silo-00"], ends[0], header(Kind.REKEY, ends[0]), self._ephemeral)
        opened = ends[1].open(asked.frames)
        answer = header(Kind.REKEYED, ends[1])
        if draw.randrange(2):
            body = self._resigned("silo-00", REKEY_LABEL, (bytes(16),), bytes(opened.body), draw)
            asked_again = replace(opened, body=memoryview(body))
            return lambda: answer_rekey(
                identities[COORDINATOR], keys["silo-00"], ends[1], asked_again, answer, self._ephemeral
            )
        answered = ends[0].open(
            answer_rekey(identities[COORDINATOR], keys["silo-00"], ends[1], opened, answer, self._ephemeral).frames
        )
        context = bytes(16), state.body
        body = self._resigned(COORDINATOR, REKEYED_LABEL, context, bytes(answered.body), draw)
        changed = replace(answered, body=memoryview(body))
        return lambda: finish_rekey(state, keys[COORDINATOR], ends[0], changed)

    def _resigned(self, name: str, label: bytes, context: tuple[bytes, ...], body: bytes, draw: random.Random) -> bytes:
        signature, packed = body[: handshake.SIGNATURE_BYTES], body[handshake.SIGNATURE_BYTES :]
        packed = damaged_msgpack(packed, draw)
        if draw.randrange(2):
            signature = self._keys[name].key.sign(label + handshake.transcript_digest(*context, packed))
        return signature + packed

    def _signed(
        self, name: str, label: bytes, context: bytes, frames: tuple[bytes, bytes], draw: random.Random
    ) -> tuple[bytes, bytes]:
        """Damaged frames of a handshake message; half of them signed again, so that their fields are read."""
        clear, body = frames
        signature, packed = body[: handshake.SIGNATURE_BYTES], body[handshake.SIGNATURE_BYTES :]
        if draw.randrange(2):
            clear = damaged_msgpack(clear, draw)
        else:
            packed = damaged_msgpack(packed, draw)
        if draw.randrange(2):
            signature = self._keys[name].key.sign(label + handshake.transcript_digest(context, clear, packed))
        return clear, signature + packed

    def _hello_frames(self, draw: random.Random) -> Callable[[], object]:
        frames = self._signed("silo-00", handshake.HELLO_LABEL, b"", self._hello, draw)
        coordinator = self._keys[COORDINATOR]
        return lambda: handshake.respond(coordinator, self._accepted, _RUN, frames, 0.0, ephemeral=self._ephemeral)

    def _welcome_frames(self, draw: random.Random) -> Callable[[], object]:
        context = handshake.transcript_digest(*self._hello)
        frames = self._signed(COORDINATOR, handshake.WELCOME_LABEL, context, self._welcome, draw)
        return lambda: handshake.complete(self._initiated, self._accepted, frames, 0.0)

    def _ready(self, draw: random.Random) -> Callable[[], object]:
        welcome, responded = self._answered()
        ready, _ = handshake.complete(self._initiated, self._accepted, welcome, 0.0)
        frames = [bytes(frame) for frame in ready]
        at = draw.randrange(2)
        frames[at] = (damaged_bytes if at else damaged_msgpack)(frames[at], draw)
        return lambda: handshake.confirm(responded, frames)


_readers = cache(Readers)


@st.composite
def frames(draw: st.DrawFn, name: str) -> Callable[[], object]:
    """A reader with a damaged frame."""
    return _readers().reader(name, draw(st.randoms()))


def read_frame(read: Callable[[], object]) -> str:
    """Have a reader read its frame; returns the outcome: ``accepted``, or the reason of the refusal."""
    try:
        read()
    except RemoteWireError as error:
        return error.reason
    return "accepted"
