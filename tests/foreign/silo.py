"""A silo written from docs/reference/wire.md and message_logs.md alone, without fedmq and torch.

    python silo.py --connect tcp://127.0.0.1:5555 --keys keys --name silo-03 --run run.json --data data.npz \
        --log runs/manual/messages/silo-03.jsonl

``data.npz`` has ``items``, the three digests of each item of the data set (uint8 [n, 3, 32]), and ``counts``, the
numbers of the silo's own items by split and modality (int64 [5, 3]). ``run.json`` has ``run``, ``scenario``,
``protocol``, ``privacy`` and ``data`` of the coordinator's start record.

It takes part in a run of RCSR as a silo with captions only. Its training is weight decay: it minimises half the squared
length of the parameters it trains, for which it needs no data.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import hashlib
import json
import os
import re
import struct
import time
from pathlib import Path

import blake3
import msgpack
import numpy as np
import zmq
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

COORDINATOR, VERSION, BEAT_SECONDS = "coordinator", 1, 2.0
#: Fields of each payload kind in the order of its table; those in the second tuple are tensors.
FIELDS = {
    "model": (("layout_digest", "buffer"), ("buffer",)),
    "partial_delta": (("layout_digest", "names", "buffer", "n_samples"), ("buffer",)),
    "modality_prototypes": (("image", "text", "mask"), ("image", "text")),
    "geometry": (("values",), ("values",)),
    "loss": (("value",), ()),
    "data_statement": (("data", "mask", "counts"), ("counts",)),
    "error": (("code", "text"), ()),
}


def digest_of(*parts):
    """The handshake's digest of byte strings."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


# ------------------------------------------------------------------------------------------------------- message log
def text_of(value):
    """A field that is no tensor, as the digest of a payload covers it."""
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, float):
        digits = np.format_float_scientific(value, unique=True, trim="-")
        mantissa, exponent = digits.split("e")
        if -4 <= int(exponent) < 16:
            return np.format_float_positional(value, unique=True, trim="0")
        return f"{mantissa}e{exponent[0]}{exponent[1:].lstrip('0').zfill(2)}"
    if isinstance(value, int):
        return str(value)
    return "(" + ", ".join(map(text_of, value)) + (",)" if len(value) == 1 else ")")


def payload_digest(kind, fields):
    """The BLAKE3 digest of a payload in the message logs."""
    total = blake3.blake3(kind.encode())
    for name in FIELDS[kind][0]:
        value = fields[name]
        if isinstance(value, np.ndarray):
            sizes = ", ".join(map(str, value.shape)) + ("," if value.ndim == 1 else "")
            total.update(f"\0{name}\0{value.dtype.name}({sizes})\0".encode())
            total.update(value.tobytes())
        else:
            total.update(f"\0{name}\0{text_of(value)}".encode())
    return total.hexdigest()


class Log:
    """The silo's message log: JSON lines in a hash chain, signed by the silo."""

    def __init__(self, path, name, run, key):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file, self.name, self.head, self.count, self.wall = path.open("wb"), name, "0" * 64, 0, ""
        self.run, self.key = run, key

    def sign(self, at):
        record = self.next() | {"action": "signed", "at": at}
        statement = f"fedmq log 1\n{self.run}\n" + json.dumps(record, sort_keys=True, separators=(",", ":"))
        self.write(**record, signature=self.key.sign(statement.encode()).hex())

    def next(self):
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self.wall = max(now, self.wall)  # this machine's clock may be set back
        return {"n": self.count, "process": self.name, "wall": self.wall, "previous": self.head}

    def write(self, **record):
        record = self.next() | record
        body = json.dumps(record, sort_keys=True, separators=(",", ":"))
        self.head = record["hash"] = hashlib.sha256((self.head + body).encode()).hexdigest()
        self.file.write(json.dumps(record, sort_keys=True, separators=(",", ":")).encode() + b"\n")
        self.file.flush()
        self.count += 1

    def message(self, action, header, payloads, frames, head):
        kept = {name: header[name] for name in header if name not in ("wire_version", "session")}
        self.write(
            action=action,
            **kept,
            session=header["session"].hex(),
            payloads=[[kind, sum(fields[name].nbytes for name in FIELDS[kind][1])] for kind, fields in payloads],
            digests=[payload_digest(kind, fields) for kind, fields in payloads],
            bytes=sum(map(len, frames)),
            tag=frames[1][-16:].hex(),
            **({} if head is None else {"head": head.hex()}),
        )


# ------------------------------------------------------------------------------------------------------------- bodies
def encoded(payloads, head):
    """A body with payloads and the head of the sender's log."""
    rows, tensors = [], []
    for kind, fields in payloads:
        row = {}
        for name in FIELDS[kind][0]:
            value = fields[name]
            if isinstance(value, np.ndarray):
                tensors.append(value.tobytes())
                value = [value.dtype.name, list(value.shape)]
            row[name] = value
        rows.append([kind, row])
    plain = msgpack.packb(
        {"payloads": rows, "task": None, "layout": None, "head": bytes.fromhex(head)}, use_bin_type=True
    )
    body = bytearray(len(plain).to_bytes(4, "little") + plain)
    for raw in tensors:
        body += bytes(-len(body) % 16) + raw
    return bytes(body)


def decoded(body):
    """The map of a body, with arrays in place of its tensors."""
    end = 4 + int.from_bytes(body[:4], "little")
    plain = msgpack.unpackb(body[4:end])
    for kind, fields in plain["payloads"]:
        for name in FIELDS[kind][0]:
            if name in FIELDS[kind][1]:
                dtype, sizes = fields[name]
                start = end + -end % 16
                count = int(np.prod(sizes))
                fields[name] = np.frombuffer(body, np.dtype(dtype).newbyteorder("<"), count, start).reshape(sizes)
                end = start + fields[name].nbytes
    assert end == len(body), "bytes after the last tensor"
    return plain


def opened(content):
    """The header and the body of a message with a short clear header."""
    length, size = int.from_bytes(content[:4], "little"), int.from_bytes(content[4:12], "little")
    start = 12 + length + -(12 + length) % 16
    assert not any(content[12 + length : start]) and not any(content[start + size :]), "padding that is not zero"
    return msgpack.unpackb(content[12 : 12 + length]), content[start : start + size]


# ----------------------------------------------------------------------------------------------------------- sessions
def ticket(private, coordinator, name):
    """The password with which a coordinator over TCP admits a connection."""
    fields = private.public_key().public_bytes_raw() + coordinator.public_bytes_raw()
    fields += (time.time_ns() // 1_000_000).to_bytes(8, "big") + os.urandom(16)
    return base64.b64encode(fields + private.sign(b"fedmq 1 ticket" + fields + name.encode()))


class Silo:
    """The silo's connection and state."""

    def __init__(self, options):
        facts = json.loads(options.run.read_text())
        self.name, self.run = options.name, facts["run"]
        with np.load(options.data, allow_pickle=False) as data:
            self.items, self.counts = data["items"], data["counts"]
        self.samples = int(self.counts[0].sum())
        self.key = serialization.load_pem_private_key((options.keys / f"{self.name}.key").read_bytes(), None)
        pem = (options.keys / "accepted" / f"{COORDINATOR}.pub").read_bytes()
        self.coordinator = serialization.load_pem_public_key(pem)
        self.log = Log(options.log, self.name, self.run, self.key)
        self.log.write(action="note", event="started", run=self.run)
        facts = {name: facts[name] for name in ("run", "scenario", "protocol", "privacy", "data")}
        own, peer = (key.public_bytes_raw().hex() for key in (self.key.public_key(), self.coordinator))
        self.log.write(action="start", **facts, key=own, peers={COORDINATOR: peer})
        self.log.sign("start")
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        if options.connect.startswith("tcp:"):
            self.socket.setsockopt(zmq.PLAIN_USERNAME, self.name.encode())
            self.socket.setsockopt(zmq.PLAIN_PASSWORD, ticket(self.key, self.coordinator, self.name))
        self.socket.connect(options.connect)
        self.layout, self.previous, self.replies, self.sent, self.received = None, None, {}, 0, 0

    def header(self, kind, **more):
        header = {"wire_version": VERSION, "run": self.run, "kind": kind, "sender": self.name, "receiver": COORDINATOR}
        header |= {"sequence": 0, "reply_to": None, "base_version": 0, "sent_at": 0.0, "session": b"", "counter": 0}
        return {**header, **more}

    def handshake(self):
        """Hello, welcome, ready."""
        x25519, mlkem = X25519PrivateKey.generate(), MLKEM768PrivateKey.generate()
        clear = msgpack.packb(self.header("hello"), use_bin_type=True)
        fields = {"nonce": os.urandom(32)}
        fields |= {"x25519": x25519.public_key().public_bytes_raw(), "mlkem768": mlkem.public_key().public_bytes_raw()}
        packed = msgpack.packb(fields, use_bin_type=True)
        signature = self.key.sign(b"fedmq 1 hello" + digest_of(b"", clear, packed))
        hello = (clear, signature + packed)
        self.log.write(action="sent", kind="hello", peer=COORDINATOR, bytes=sum(map(len, hello)))
        self.socket.send_multipart(hello)
        assert self.socket.poll(60_000), "no welcome within a minute"
        welcome = self.socket.recv_multipart()
        header = msgpack.unpackb(welcome[0])
        assert (header["kind"], header["run"], header["receiver"]) == ("welcome", self.run, self.name), header
        signature, packed = welcome[1][:64], welcome[1][64:]
        self.coordinator.verify(signature, b"fedmq 1 welcome" + digest_of(digest_of(*hello), welcome[0], packed))
        self.log.write(action="received", kind="welcome", peer=COORDINATOR, bytes=sum(map(len, welcome)))
        fields = msgpack.unpackb(packed)
        secret = x25519.exchange(X25519PublicKey.from_public_bytes(fields["x25519"]))
        secret += mlkem.decapsulate(fields["mlkem768"])
        transcript = digest_of(*hello, *welcome)

        def derived(label, length):
            return HKDF(SHA256(), length, salt=transcript, info=b"fedmq 1 " + label).derive(secret)

        self.session = derived(b"session", 16)
        self.up = AESGCM(derived(b"initiator to responder", 32))
        self.down = AESGCM(derived(b"responder to initiator", 32))
        frames = self.sealed(
            self.header("ready", reply_to=header["sequence"]), self.key.sign(b"fedmq 1 ready" + transcript)
        )
        self.log.write(action="sent", kind="ready", peer=COORDINATOR, bytes=sum(map(len, frames[1])))
        self.socket.send_multipart(frames[1])

    def sealed(self, header, body):
        """The header with its place in the session, and the sealed frames."""
        header = {**header, "session": self.session, "counter": self.sent}
        clear = msgpack.packb(header, use_bin_type=True)
        frames = (clear, self.up.encrypt(bytes(4) + self.sent.to_bytes(8, "big"), body, clear))
        self.sent += 1
        return header, frames

    def send(self, kind, payloads=(), **more):
        if kind in ("reply", "error"):
            self.log.sign("reply")
        head = self.log.head
        header, frames = self.sealed(self.header(kind, **more), encoded(payloads, head))
        self.log.message("sent", header, payloads, frames, bytes.fromhex(head))  # before the frames leave
        self.socket.send_multipart(frames)

    def receive(self, seconds):
        """The header and the body of the next message; None if there is none in time."""
        if not self.socket.poll(seconds * 1000):
            return None
        frames = self.socket.recv_multipart()
        clear = msgpack.unpackb(frames[0])
        nonce = (len(frames) - 2).to_bytes(4, "big") + self.received.to_bytes(8, "big")
        body = self.down.decrypt(nonce, frames[1], frames[0])
        header, body = opened(body) if len(clear) == 3 else (clear, body)
        if len(frames) == 3:
            start, number, key, digest = struct.unpack(">QQ32s32s", body[:80])
            part = AESGCM(key).decrypt(bytes(12), frames[2], None)
            body = body[80 : 80 + start] + part + body[80 + start :]
        assert all(header[name] == clear[name] for name in clear), (clear, header)
        expected = (VERSION, self.run, self.session, COORDINATOR, self.name, self.received)
        names = ("wire_version", "run", "session", "sender", "receiver", "counter")
        assert tuple(header[name] for name in names) == expected, header
        self.received += 1
        plain = decoded(body)
        if len(frames) == 3:
            assert payload_digest(*plain["payloads"][number]) == digest.hex(), "the shared part was replaced"
        self.log.message("received", header, plain["payloads"], frames, plain["head"])
        return header, plain

    def state_data(self):
        """Send the first message of the session: what data this silo has, which must be the coordinator's data set."""
        salted = hashlib.sha256(f"fedmq data\0{self.run}\0".encode() + self.items.tobytes()).hexdigest()
        self.send("statement", [("data_statement", {"data": salted, "mask": 2, "counts": self.counts})])

    # --------------------------------------------------------------------------------------------------------- training
    def trained(self, task, payloads):
        """The payloads of a reply of RCSR, from one step of weight decay on the layers without the image branch."""
        model, prototypes = payloads["model"], payloads["modality_prototypes"]
        names = [name for name, *_ in self.layout if not name.startswith("visual.")]
        sizes = {name: int(np.prod(shape)) for name, _, shape, _ in self.layout}
        starts = {name: offset // 4 for name, _, _, offset in self.layout}
        part = np.concatenate([model["buffer"][starts[name] : starts[name] + sizes[name]] for name in names])
        update = (-task["learning_rate"] * part).astype(np.float32)
        length = float(np.linalg.norm(update))
        turn = 0.0
        if self.previous is not None:
            turn = float(update @ self.previous) / max(length * float(np.linalg.norm(self.previous)), 1e-12)
        self.previous = update
        text = np.array(prototypes["text"])
        if not prototypes["mask"] & 2:
            text = np.eye(1, len(text), dtype=np.float32)[0]
        geometry = np.array([length, 0.0, turn, length / np.sqrt(self.samples)], np.float32)
        delta = {"layout_digest": model["layout_digest"], "names": names, "buffer": update, "n_samples": self.samples}
        return [
            ("partial_delta", delta),
            ("modality_prototypes", {"image": np.array(prototypes["image"]), "text": text, "mask": 2}),
            ("geometry", {"values": geometry}),
            ("loss", {"value": float(0.5 * np.mean(part.astype(np.float64) ** 2))}),
        ]

    def serve(self):
        """Answer tasks until the coordinator says stop."""
        beat = 0.0
        while True:
            if time.monotonic() - beat >= BEAT_SECONDS:
                beat = time.monotonic()
                self.send("heartbeat")
            message = self.receive(0.2)
            if message is None:
                continue
            header, plain = message
            answer = {"sequence": header["sequence"], "reply_to": header["sequence"]}
            answer["base_version"] = header["base_version"]
            match header["kind"]:
                case "stop":
                    return
                case "error":
                    raise SystemExit(
                        "the coordinator ended the session: {code}: {text}".format(**plain["payloads"][0][1])
                    )
                case "layout":
                    self.layout = plain["layout"]
                case "task":
                    committed, number = plain["task"]["committed"], header["sequence"]
                    self.replies = {each: reply for each, reply in self.replies.items() if each > committed}
                    if number not in self.replies:  # a task that comes again has the same reply
                        self.replies[number] = self.trained(plain["task"], dict(plain["payloads"]))
                    self.send("reply", self.replies[number], **answer)
                case "evaluate":
                    self.send("error", [("error", {"code": "unsupported", "text": "no personal model"})], **answer)


def main():
    parser = argparse.ArgumentParser(description="A silo that knows fedmq's wire from its document alone.")
    parser.add_argument("--connect", required=True)
    parser.add_argument("--keys", required=True, type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--log", required=True, type=Path)
    options = parser.parse_args()
    assert re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", options.name), options.name
    silo = Silo(options)
    silo.handshake()
    silo.state_data()
    silo.serve()
    silo.log.write(action="note", event="ended")
    silo.log.sign("end")


if __name__ == "__main__":
    main()
