"""Write the golden frames in tests/frames/: messages of the wire format, byte by byte, with fixed keys.

    python tools/make_golden_frames.py

Writes all files. From the first release on, its files must decode for ever: a new wire version then gets new files.
Each file is JSON with bytes in hexadecimal.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedmq.config.sections import Wire
from fedmq.wire.codec import encode_body, encode_tensors
from fedmq.wire.compression import Settings, decoded, encoded
from fedmq.wire.handshake import complete, confirm, initiate, respond
from fedmq.wire.key_agreement import Ephemeral, answer_rekey, begin_rekey, finish_rekey
from fedmq.wire.keys import Identity
from fedmq.wire.layout import Layout
from fedmq.wire.messages import WIRE_VERSION, Header, Kind, Message, TaskInfo
from fedmq.wire.payloads import (
    ClassPrototypes,
    ClipNorm,
    ControlVariate,
    DataFormat,
    DataStatement,
    Delta,
    DiscriminatorDelta,
    Error,
    Geometry,
    LabelCount,
    LocalSteps,
    Loss,
    MaskedUpdate,
    MeanAveragePrecision,
    Memory,
    Metrics,
    ModalityPrototypes,
    Model,
    PartialDelta,
    Payload,
    Refusal,
    Representations,
    RevealedShares,
    RouterStatistics,
    RouterSums,
    RunStatus,
    SealedShares,
    SiloMetrics,
    SiloModalities,
    SumKeys,
    SumWeights,
    Survivors,
    UpdateReport,
)
from fedmq.wire.sessions import Session, SharedPart, seal_message

FRAMES = Path(__file__).parent.parent / "tests" / "frames"
RUN = "golden-1"
SESSION = bytes(range(16))
HEAD = bytes(range(64, 96))
UP_KEY = bytes(range(32))
DOWN_KEY = bytes(range(32, 64))
SHARED_KEY = bytes(range(96, 128))
LAYOUT = Layout.of([("visual.proj", (2, 3), "float32"), ("text.bias", (2,), "float32"), ("logit_scale", (), "float32")])


_NOTHING_HIDDEN = Wire()


def golden_messages() -> dict[str, Message]:
    """All message kinds after the handshake and all payload kinds, by file name."""
    messages = _compressed() | _messages() | _of_data()
    messages["status"] = Message(down(Kind.STATUS), (RunStatus('{"run": "größer-0123456789ab"}'),))
    messages |= _of_sums()
    messages["refusal"] = Message(up(Kind.ERROR, reply_to=5), (Refusal("kinds", "representations"),))
    return {name: replace(message, head=HEAD) for name, message in messages.items()}


def _compressed() -> dict[str, Message]:
    """An update in each form in which it may be compressed."""
    floats, settings = np.arange(9, dtype=np.float32) / 8, Settings(fraction=0.3)
    buffers = {form: encoded(form, floats, settings) for form in ("bfloat16", "int8", "top_k")}
    # Not encoded here: the bits of the factors depend on the machine.
    segments = np.array([2, 3, 1, 3, 1, 0])
    buffers["low_rank"] = decoded("low_rank", (segments, floats[:8].copy()), 9)
    deltas = {form: Delta(LAYOUT.digest, buffer, 300) for form, buffer in buffers.items()}
    return {f"reply-delta_{form}": Message(up(Kind.REPLY, reply_to=5), (delta,)) for form, delta in deltas.items()}


def _of_data() -> dict[str, Message]:
    """Messages about the silos' data and of their own evaluations."""
    statement = DataStatement(LAYOUT.digest, 3, np.arange(15, dtype=np.int64).reshape(5, 3))
    nothing = np.zeros(0, np.float32)
    shapes = np.array([512]), np.array([768])
    stated = DataFormat(("Katze", "犬"), ("a",), *shapes, "float32", "float32", "none", LAYOUT.digest, nothing, nothing)
    model = Model(LAYOUT.digest, np.arange(9, dtype=np.float32) / 8)
    return {
        "statement": Message(up(Kind.STATEMENT), (statement, stated)),
        "agreement": Message(down(Kind.AGREEMENT), (stated, SiloModalities(("silo-00", "silo-01"), np.array([3, 1])))),
        "evaluate_silo": Message(down(Kind.EVALUATE_SILO), (model,)),
        "silo_result": Message(up(Kind.SILO_RESULT, reply_to=5), (SiloMetrics(20, {"mean_r1": 0.5}),)),
    }


def _of_sums() -> dict[str, Message]:
    """A silo's messages of a secure sum, and the request of its last step, which has all that the others have."""
    silos, two = ("silo-00", "silo-01"), np.arange(128, dtype=np.uint8).reshape(2, 2, 32)
    parts = LAYOUT.digest, two[0], two[1, 0], np.arange(64, dtype=np.uint8)
    report = UpdateReport(300, ("text", "image"), np.array([7, 0, 300]), *parts)
    sealed = SealedShares(np.arange(120, dtype=np.uint8).reshape(2, 60))
    weights = SumWeights(LAYOUT.digest, silos, ("text", "image"), np.array([[0.25, 0.75], [1.0, 0.0]]))
    keys = SumKeys(silos, two, two[:, 0].copy(), two.reshape(2, 64))
    replies = {
        "update_report": report,
        "sealed_shares": sealed,
        "masked_update": MaskedUpdate(LAYOUT.digest, np.array([0, 1, 2**32 - 1], np.uint32)),
        "revealed_shares": RevealedShares(np.arange(32, dtype=np.uint8).reshape(2, 16)),
    }
    return {
        **{f"reply-{name}": Message(up(Kind.REPLY, reply_to=5), (payload,)) for name, payload in replies.items()},
        "sum": Message(down(Kind.SUM), (keys, weights, Survivors(silos[:1]), sealed)),
    }


def _messages() -> dict[str, Message]:
    floats = np.arange(9, dtype=np.float32) / 8
    counts = np.array([3, 0], np.int64)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5
    payloads: dict[str, Payload] = {
        "model": Model(LAYOUT.digest, floats),
        "delta": Delta(LAYOUT.digest, floats, 300),
        "partial_delta": PartialDelta(LAYOUT.digest, ("logit_scale", "text.bias"), floats[:3].copy(), 70_000),
        "modality_prototypes": ModalityPrototypes(floats[:5].copy(), -floats[:5], 1),
        "class_prototypes": ClassPrototypes(rows, counts, "image"),
        "memory": Memory(rows, counts),
        "router_statistics": RouterStatistics(0.25),
        "router_sums": RouterSums(floats, rows, counts),
        "clip_norm": ClipNorm(0.25),
        "geometry": Geometry(floats[:4].copy()),
        "loss": Loss(0.6931),
        "map": MeanAveragePrecision(0.75),
        "label_count": LabelCount(24),
        "representations": Representations(rows.astype(np.float16), "text"),
        "representations_float32": Representations(rows, "both"),
        "discriminator_delta": DiscriminatorDelta(LAYOUT.digest, -floats, 1),
        "control_variate": ControlVariate(LAYOUT.digest, floats / 2, 4),
        "local_steps": LocalSteps(np.array([8, 0, 8])),
        "metrics": Metrics({"mean_r1": 0.5, "i2t_r1": 0.25}, {"silo-00": {"mean_r1": 0.125}, "silo-01": {}}),
    }
    info = TaskInfo(round=2, rounds=200, committed=1, learning_rate=0.001)
    everything = tuple(payloads.values())
    messages = {f"reply-{name}": Message(up(Kind.REPLY, reply_to=5), (payload,)) for name, payload in payloads.items()}
    return {
        **messages,
        "reply-everything": Message(up(Kind.REPLY, reply_to=5), everything),
        "layout": Message(down(Kind.LAYOUT), layout=LAYOUT),
        "task": Message(down(Kind.TASK), (payloads["model"], payloads["modality_prototypes"]), info),
        "evaluate": Message(down(Kind.EVALUATE), (payloads["model"],)),
        "heartbeat": Message(up(Kind.HEARTBEAT)),
        "stop": Message(down(Kind.STOP)),
        "error": Message(up(Kind.ERROR, reply_to=5), (Error("training_failed", "größer → ∞"),)),
    }


def up(kind: Kind, reply_to: int | None = None) -> Header:
    return Header(
        run=RUN,
        kind=kind,
        sender="silo-00",
        receiver="coordinator",
        sequence=9,
        reply_to=reply_to,
        base_version=4,
        sent_at=12.5,
    )


def down(kind: Kind) -> Header:
    return Header(
        run=RUN, kind=kind, sender="coordinator", receiver="silo-00", sequence=5, base_version=4, sent_at=10.25
    )


def golden_session(name: str, options: Wire = _NOTHING_HIDDEN) -> Session:
    """One end of the session with the fixed keys; ``name`` is ``silo-00`` or ``coordinator``."""
    keys = (UP_KEY, DOWN_KEY) if name == "silo-00" else (DOWN_KEY, UP_KEY)
    peer = "coordinator" if name == "silo-00" else "silo-00"
    return Session(
        run=RUN, name=name, peer=peer, session=SESSION, send_key=keys[0], receive_key=keys[1], options=options
    )


def golden_identity(name: str, seed: int) -> Identity:
    return Identity(name, Ed25519PrivateKey.from_private_bytes(bytes([seed] * 32)))


def golden_ephemeral(seed: int) -> Ephemeral:
    return Ephemeral(
        bytes([seed] * 32),
        X25519PrivateKey.from_private_bytes(bytes([seed + 1] * 32)),
        MLKEM768PrivateKey.from_seed_bytes(bytes([seed + 2] * 64)),
    )


def describe(message: Message) -> dict[str, Any]:
    """A message in JSON types; floats are exact, arrays become dtype, shape and values."""
    return {
        "header": {name: plain(value) for name, value in vars(message.header).items()},
        "payloads": [
            {"kind": payload.KIND, **{name: plain(getattr(payload, name)) for name in payload.FIELDS}}
            for payload in message.payloads
        ],
        "task": None if message.task is None else vars(message.task),
        "layout": None if message.layout is None else message.layout.to_plain(),
        **({} if message.head is None else {"head": message.head.hex()}),
    }


def plain(value: Any) -> Any:
    match value:
        case np.ndarray():
            return {"dtype": value.dtype.name, "shape": list(value.shape), "values": value.reshape(-1).tolist()}
        case bytes():
            return value.hex()
        case tuple():
            return list(value)
        case dict():
            return {name: plain(inner) for name, inner in value.items()}
        case _:
            return value


def sealed_entry(message: Message) -> dict[str, Any]:
    session = golden_session(message.header.sender)
    sealed = seal_message(session, message)
    return {
        "wire_version": sealed.header.wire_version,
        "key": (UP_KEY if message.header.sender == "silo-00" else DOWN_KEY).hex(),
        "clear": bytes(sealed.frames[0]).hex(),
        "body": b"".join(encode_body(message)).hex(),
        "sealed": bytes(sealed.frames[1]).hex(),
        "tag": sealed.tag,
        "message": describe(replace(message, header=sealed.header)),
    }


def handshake_entry() -> dict[str, Any]:
    """A complete handshake; all but the welcome is reproducible, as ML-KEM encapsulation is random."""
    silo, coordinator = golden_identity("silo-00", 1), golden_identity("coordinator", 2)
    keys = {identity.name: identity.key.public_key() for identity in (silo, coordinator)}
    hello, initiated = initiate(silo, "coordinator", RUN, 1.0, golden_ephemeral(10))
    welcome, responded = respond(coordinator, keys, RUN, hello, 2.0, ephemeral=golden_ephemeral(20))
    ready, session = complete(initiated, keys, welcome, 3.0)
    confirm(responded, ready)
    first = seal_message(session, Message(up(Kind.HEARTBEAT)))
    return {
        "wire_version": WIRE_VERSION,
        "hello": [frame.hex() for frame in hello],
        "welcome": [frame.hex() for frame in welcome],
        "ready": [bytes(frame).hex() for frame in ready],
        "session": session.session.hex(),
        "heartbeat": [bytes(frame).hex() for frame in first.frames],
    }


def short_entry() -> dict[str, Any]:
    """Messages whose header is sealed with the body: without and with padding."""
    entries = {}
    for name, options in (("hidden", Wire(hide_names=True)), ("padded", Wire(padding=True))):
        message = golden_messages()["reply-loss"]
        sealed = seal_message(golden_session("silo-00", options), message)
        entries[name] = {
            "clear": bytes(sealed.frames[0]).hex(),
            "sealed": bytes(sealed.frames[1]).hex(),
            "message": describe(replace(message, header=sealed.header)),
        }
    return {"wire_version": WIRE_VERSION, "key": UP_KEY.hex(), **entries}


def golden_shared() -> tuple[Message, SharedPart]:
    """A task, and its model sealed once for all silos."""
    message = golden_messages()["task"]
    content = b"".join(encode_tensors(message.payloads[0]))
    part = AESGCM(SHARED_KEY).encrypt(bytes(12), content, None)
    return message, SharedPart(message.payloads[0], SHARED_KEY, memoryview(part))


def shared_entry() -> dict[str, Any]:
    """The same message with a whole and with a short header, and with a shared part in a frame of its own."""
    message, part = golden_shared()
    options = {"whole": Wire(), "hidden": Wire(hide_names=True)}
    ends = {name: golden_session("coordinator", each) for name, each in options.items()}
    sealed = {name: seal_message(end, message, shared=part) for name, end in ends.items()}
    frames = {name: [bytes(frame).hex() for frame in each.frames] for name, each in sealed.items()}
    described = describe(replace(message, header=sealed["whole"].header))
    return {"wire_version": WIRE_VERSION, "key": DOWN_KEY.hex(), **frames, "message": described}


def rekey_entry() -> dict[str, Any]:
    """New keys within a session; all but the rekeyed is reproducible, as ML-KEM encapsulation is random."""
    silo, coordinator = golden_identity("silo-00", 1), golden_identity("coordinator", 2)
    ends = golden_session("silo-00"), golden_session("coordinator")
    asked, state = begin_rekey(silo, ends[0], up(Kind.REKEY), golden_ephemeral(30))
    opened = ends[1].open(asked.frames)
    answered = answer_rekey(
        coordinator, silo.key.public_key(), ends[1], opened, down(Kind.REKEYED), golden_ephemeral(40)
    )
    finish_rekey(state, coordinator.key.public_key(), ends[0], ends[0].open(answered.frames))
    first = seal_message(ends[0], Message(up(Kind.HEARTBEAT)))
    return {
        "wire_version": WIRE_VERSION,
        "rekey": [bytes(frame).hex() for frame in asked.frames],
        "rekeyed": [bytes(frame).hex() for frame in answered.frames],
        "session": ends[0].session.hex(),
        "heartbeat": [bytes(frame).hex() for frame in first.frames],
    }


def main() -> None:
    FRAMES.mkdir(exist_ok=True)
    entries = {name: sealed_entry(message) for name, message in golden_messages().items()}
    entries |= {
        "handshake": handshake_entry(),
        "short": short_entry(),
        "shared": shared_entry(),
        "rekey": rekey_entry(),
    }
    for name, entry in entries.items():
        path = FRAMES / f"v{WIRE_VERSION}-{name}.json"
        path.write_text(json.dumps(entry, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {len(entries)} files")


if __name__ == "__main__":
    main()
