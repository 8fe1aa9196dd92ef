"""Time stamps of heads files by an outside authority (RFC 3161): proof that these heads existed at a certain time."""

from __future__ import annotations

import hashlib
import http.client
import urllib.request
from pathlib import Path
from typing import Any

from cryptography import x509

from fedmq.errors import FedmqError, InputError, RunError
from fedmq.packages import package
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import write_bytes
from fedmq.text import printable

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
