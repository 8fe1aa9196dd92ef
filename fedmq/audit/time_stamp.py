"""Time stamps of heads files by an outside authority (RFC 3161): proof that these heads existed at a certain time."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from cryptography import x509

from fedmq.errors import InputError, RunError
from fedmq.extras import package
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import write_atomically

_TIMEOUT_SECONDS = 30.0
#: Largest response of an authority [bytes].
_MAX_RESPONSE = 1 << 20
_TYPES = {"Content-Type": "application/timestamp-query", "Accept": "application/timestamp-reply"}


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
        RunError: the authority cannot be reached, or refuses.
    """
    client = package("rfc3161_client", "timestamps", "--stamp")
    if not url.startswith(("http://", "https://")):
        raise InputError("--stamp", url, "the http:// or https:// address of a time-stamping authority")
    content = heads.read_bytes()
    request = client.TimestampRequestBuilder().data(content).nonce(nonce=True).build()
    # The scheme was checked above.
    query = urllib.request.Request(url, request.as_bytes(), _TYPES)  # noqa: S310
    try:
        with urllib.request.urlopen(query, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
            raw = answer.read(_MAX_RESPONSE)
    except (OSError, urllib.error.URLError) as error:
        raise RunError(f"--stamp {url}: no time stamp: {error}") from None
    response = _decoded(client, raw, url)
    if response.tst_info.nonce != request.nonce:
        raise RunError(f"--stamp {url}: a time stamp of another request")
    write_atomically(token_of(heads), lambda path: _write(path, raw))
    return str(response.tst_info.gen_time.isoformat())


def _write(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)


def _decoded(client: Any, raw: bytes, place: str) -> Any:
    try:
        response = client.decode_timestamp_response(raw)
        if client.PKIStatus(response.status) != client.PKIStatus.GRANTED:
            raise RunError(f"{place}: the authority did not grant a time stamp ({', '.join(response.status_string)})")
        response.tst_info.gen_time.isoformat()
    except ValueError as error:
        raise RunError(f"{place}: not a time stamp: {error}") from None
    return response


def verified(heads: Path, authority: Path) -> str | None:
    """Verify the time stamp next to a heads file.

    Args:
        heads: the file.
        authority: root certificate of the authority that must have stamped it (PEM).

    Returns:
        Time and name of the stamp; None if it is not one of this file by this authority.

    Raises:
        InputError: the certificate or the stamp cannot be read.
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
    try:
        response = _decoded(client, raw, str(token_of(heads)))
        builder.build().verify_message(response, heads.read_bytes())
    except (client.VerificationError, RunError, ValueError):
        return None
    names = sorted(root.subject.rfc4514_string() for root in roots)
    return f"{response.tst_info.gen_time.isoformat()}, by the time stamp of {names[0]}"
