"""The heads of a run's message logs, noted in a file that an outside authority may time-stamp, and compared later.

A time stamp (RFC 3161) proves that the heads existed at a certain time.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography import x509
from pydantic import Field

from fedmq.audit.log_checks import Audit, Finding
from fedmq.errors import FedmqError, InputError, RunError
from fedmq.packages import package
from fedmq.storage.json_files import Digest, Stored, read_json
from fedmq.storage.regular_files import is_file, read_regular
from fedmq.storage.run_folder import write_bytes, write_text
from fedmq.text import printable

_DIGEST = re.compile(r"[0-9a-f]{64}")
_ALLOWED = "a file of heads that `fedmq audit RUN --heads FILE` wrote, or the digest that it printed"


class Head(Stored):
    """The head of one log.

    Args:
        records: number of records.
        head: hash of the last one, computed from the records' content.
        keys: fingerprints of the keys that the process signed with.
    """

    records: int = Field(ge=0)
    head: str
    keys: list[Digest]


class Heads(Stored):
    """The heads of all logs of a run.

    Args:
        run: the run's name; empty if no log is signed.
        heads: heads by process.
    """

    run: str
    heads: dict[str, Head]

    @property
    def text(self) -> str:
        """The content of a heads file."""
        return json.dumps(self.plain(), indent=2, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the file, a single digest for all logs."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def heads_of(audit: Audit) -> Heads:
    """The heads of the logs that were audited."""
    runs = [start.run for log in audit.signatures.values() for _, start in log.joined]
    logs = audit.signatures.items()
    heads = {
        process: Head(records=log.records, head=log.head, keys=list(log.fingerprints)) for process, log in sorted(logs)
    }
    return Heads(run=runs[0] if runs else "", heads=heads)


def write_heads(heads: Heads, path: Path) -> None:
    """Write a heads file.

    Raises:
        InputError: it cannot be written there.
        DiskError: the disk is full or broken.
    """
    write_text(path, heads.text)


def differences(expected: str, audit: Audit) -> Iterator[Finding]:
    """Compare logs with heads that were noted earlier. Records added since then do not count as a difference.

    Args:
        expected: a heads file; the digest of such a file, which only the same logs without further records have; or the
            head of one log, which programs print at their end.
        audit: the audit of the logs.

    Raises:
        InputError: the file cannot be read.
    """
    present = heads_of(audit)
    if _DIGEST.fullmatch(expected):
        if present.digest != expected and not any(log.had(expected) for log in audit.signatures.values()):
            yield Finding("--expect", f"no log has this head, and the digest of all heads is {present.digest}")
        return
    noted = read_json(Path(expected), Heads, _ALLOWED)
    for process, head in sorted(noted.heads.items()):
        log = audit.signatures.get(process)
        if log is None:
            yield Finding(f"{process}.jsonl", f"no such log, although {expected} has its head")
        elif log.records < head.records:
            yield Finding(
                f"{process}.jsonl", f"has {log.records} records, but had {head.records} according to {expected}"
            )
        elif not log.had(head.head, head.records):
            yield Finding(f"{process}.jsonl", f"its first {head.records} records are not those of {expected}")
    for process in sorted(present.heads.keys() - noted.heads.keys()):
        yield Finding(f"{process}.jsonl", f"a log of which {expected} has no head")


def check_expected(expected: str) -> None:
    """Refuse a value of ``--expect`` that is neither a digest nor a heads file, before anything is audited.

    Raises:
        InputError: see above.
    """
    if not _DIGEST.fullmatch(expected):
        if not is_file(Path(expected)):
            raise InputError("--expect", expected, _ALLOWED)
        read_json(Path(expected), Heads, _ALLOWED)


_TIMEOUT_SECONDS = 30.0
#: Maximum size of an authority's response [bytes].
_MAX_RESPONSE = 1 << 20
_TYPES = {"Content-Type": "application/timestamp-query", "Accept": "application/timestamp-reply"}


#: Beginning of the package's error for certificates that do not lead to the given ones.
_CHAIN = "Error while verifying certificates: "


class StampError(FedmqError):
    """A time stamp does not prove what it should; the text gives the reason."""


def token_of(heads: Path) -> Path:
    """The file of the time stamp of a heads file."""
    return heads.with_name(f"{heads.name}.tsr")


def stamp(heads: Path, url: str) -> str:
    """Have a heads file time-stamped and write the response next to it.

    Args:
        heads: the file.
        url: URL of the authority, http or https. Only a digest of the file is sent.

    Returns:
        The time in the stamp, ISO 8601.

    Raises:
        InputError: the URL is not allowed, or the package for time stamps is missing.
        RunError: the authority cannot be reached or refuses, or its answer is not a time stamp of this file.
    """
    client = package("rfc3161_client", "timestamps", "--stamp")
    if not url.startswith(("http://", "https://")):
        raise InputError("--stamp", url, "the http:// or https:// address of a time-stamping authority")
    content = heads.read_bytes()
    request = client.TimestampRequestBuilder().data(content).nonce(nonce=True).build()
    try:
        # The scheme was checked above.
        query = urllib.request.Request(url, request.as_bytes(), _TYPES)  # noqa: S310
        with urllib.request.urlopen(query, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
            raw = answer.read(_MAX_RESPONSE)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RunError(
            printable(f"--stamp {url}: no time stamp: {str(error).strip() or type(error).__name__}")
        ) from None
    try:
        response = _decoded(client, raw)
        if response.tst_info.nonce != request.nonce:
            raise StampError("the time stamp of another request: its nonce differs")
        _require_of(response, content, heads)
    except StampError as error:
        raise RunError(f"--stamp {url}: {error}") from None
    write_bytes(token_of(heads), raw)
    return str(response.tst_info.gen_time.isoformat())


def _decoded(client: Any, raw: bytes) -> Any:
    """The response in an authority's answer.

    Raises:
        StampError: it is not a response, or no time stamp was granted.
    """
    try:
        response = client.decode_timestamp_response(raw)
        if client.PKIStatus(response.status) != client.PKIStatus.GRANTED:
            why = ", ".join(response.status_string) or client.PKIStatus(response.status).name.lower()
            raise StampError(f"the authority did not grant a time stamp ({why})")
        response.tst_info.gen_time.isoformat()
    except ValueError as error:
        raise StampError(f"not a time stamp: {error}") from None
    return response


def _require_of(response: Any, content: bytes, heads: Path) -> None:
    """Refuse a time stamp of different content.

    Raises:
        StampError: the stamp is of different content.
    """
    stamped = response.tst_info.message_imprint.message
    if stamped not in (hashlib.new(name, content).digest() for name in ("sha256", "sha384", "sha512")):
        raise StampError(f"the time stamp of other content than {heads} has: of another file, or of an earlier version")


def verified(heads: Path, authority: Path) -> str:
    """Verify the time stamp next to a heads file.

    Args:
        heads: the file.
        authority: root certificate of the authority that must have stamped it (PEM).

    Returns:
        Time and name of the stamp.

    Raises:
        InputError: the certificate or the stamp cannot be read.
        StampError: it is not a time stamp of this file by this authority, with certificates that were valid then.
    """
    client = package("rfc3161_client", "timestamps", "--stamp-ca")
    try:
        roots = x509.load_pem_x509_certificates(read_regular(authority, "a root certificate in PEM"))
    except ValueError:
        raise InputError(str(authority), "a file that is not a certificate", "a root certificate in PEM") from None
    raw = read_regular(token_of(heads), "a time stamp that `fedmq audit RUN --heads FILE --stamp URL` wrote")
    builder = client.VerifierBuilder()
    for root in roots:
        builder = builder.add_root_certificate(root)
    content, response = read_regular(heads, "heads that `fedmq audit RUN --heads FILE` wrote"), _decoded(client, raw)
    _require_of(response, content, heads)
    at = response.tst_info.gen_time
    try:
        builder.build().verify_message(response, content)
    except (client.VerificationError, ValueError) as error:
        why = str(error)
        if why.startswith(_CHAIN):
            why = (
                f"its certificates do not lead to one in {authority} that was valid at {at}: {why.removeprefix(_CHAIN)}"
            )
        raise StampError(why) from None
    names = sorted(root.subject.rfc4514_string() for root in roots)
    return f"{at.isoformat()}, by the time stamp of {names[0]}"
