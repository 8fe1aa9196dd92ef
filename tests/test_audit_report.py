"""The report of an audit, time stamps of its heads, and its terminal output."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from rich.console import Console
from typer.testing import CliRunner

from fedmq.audit.heads import StampError, stamp, token_of, verified
from fedmq.audit.log_checks import audit_run
from fedmq.audit.report import Evidence, page, table, verdict
from fedmq.cli import main as cli
from fedmq.cli.audit import print_audit
from fedmq.errors import InputError, RunError
from tests.adversary_forged_logs import forge
from tests.waiting import PATIENCE


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def command(run: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["audit", str(run), *options])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_every_line_of_an_audit_fits_eighty_columns_and_no_figure_reads_like_none(run: Path) -> None:
    audit, console = audit_run(run), Console(record=True, width=80)
    print_audit(audit, verdict(audit, Evidence()), console)
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "loss: numbers only" in " ".join(shown.split())
    assert "loss 0" not in shown
    assert "Each log is signed by its process" in " ".join(shown.split())


def test_the_audit_writes_a_page_and_a_table_of_the_flows(run: Path) -> None:
    code, shown = command(run)
    assert code == 0 and "audit.html, and audit.csv" in " ".join(shown.split())
    rows = list(csv.DictReader(io.StringIO((run / "audit.csv").read_text())))
    columns = ["run", "method", "started", "ended", "process", "modalities", "direction", "kind", "payloads", "bytes"]
    assert list(rows[0]) == columns
    audit = audit_run(run)
    for row in rows:
        assert int(row["bytes"]) == audit.left[row["process"]][row["kind"]]
        assert int(row["payloads"]) == audit.sent[row["process"]][row["kind"]]
    assert {row["modalities"] for row in rows if row["process"] == "silo-02"} <= {"image", "text", "image and text"}
    shown = (run / "audit.html").read_text()
    outcome = "<b>the logs are consistent</b>"
    for text in (*(row["kind"] for row in rows), outcome, "What holds", "Not proven", *audit.records):
        assert text in shown
    assert not re.search(r"(src|href)=", shown)  # it needs nothing from elsewhere


def test_missing_logs_make_an_audit_incomplete_not_contradictory(run: Path) -> None:
    for name in ("silo-00", "silo-01"):
        (run / "messages" / f"{name}.jsonl").unlink()
    code, shown = command(run)
    shown = " ".join(shown.split())
    assert code == 3  # it must not look like a complete one
    assert "2 missing logs, no contradiction" in shown and "contradict each other" not in shown
    assert "Copy messages/NAME.jsonl of silo-00 and silo-01 from" in shown
    assert json.loads(command(run, "--json")[1])["incomplete"].startswith("Incomplete: ")
    assert "<b>Incomplete: nothing contradicts, but 2 logs could not be checked." in (run / "audit.html").read_text()
    path = run / "messages" / "coordinator.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    (run / "summary.json").write_text("{}")
    code, shown = command(run)
    assert code == 3 and "contradict each other" in " ".join(shown.split()) and "Incomplete" not in shown


def test_an_audit_of_a_silos_own_folder_claims_nothing_of_files_that_are_not_there(run: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "messages").mkdir(parents=True)
    shutil.copy(run / "messages" / "silo-00.jsonl", site / "messages")
    code, shown = command(site)
    holds = " ".join(shown.split()).partition("What holds: ")[2].partition("Not proven")[0]
    assert code == 3 and "log" in holds and "agree" not in holds and ".json" not in holds


def test_the_report_can_be_written_elsewhere_and_again(run: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert command(run, "--report", str(tmp_path / "report"), "--json")[0] == 0
    assert (tmp_path / "report" / "audit.html").exists() and not (run / "audit.html").exists()


def test_the_content_of_a_log_is_escaped_in_the_report(run: Path) -> None:
    def hostile(record: dict[str, object]) -> dict[str, object]:
        return record | {"payloads": [["=cmd<script>alert(1)</script>", 5]]} if record.get("payloads") else record

    forge(run, "silo-00", hostile)
    audit = audit_run(run)
    shown = page(run, audit, verdict(audit, Evidence()))
    assert "<script>" not in shown and "&lt;script&gt;" in shown
    cells = [row["kind"] for row in csv.DictReader(io.StringIO(table(run, audit)))]
    assert "'=cmd<script>alert(1)</script>" in cells  # a spreadsheet does not take it for a formula


# --------------------------------------------------------------------------------------------------------- time stamps
CONFIG = """
[tsa]
serial = {0}/serial
crypto_device = builtin
signer_cert = {0}/tsa.pem
signer_key = {0}/tsa.key
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256, sha384, sha512
accuracy = secs:1
ess_cert_id_alg = sha256
"""


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys and certificates of a time-stamping authority made for these tests."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("tsa")
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *ec, "-keyout", folder / "ca.key", "-out", folder / "ca.pem", "-subj", "/CN=Test CA",
            "-days", 2)  # fmt: skip
    openssl("req", *ec, "-keyout", folder / "tsa.key", "-out", folder / "tsa.csr", "-subj", "/CN=Test TSA")
    (folder / "ext").write_text("keyUsage=critical,digitalSignature\nextendedKeyUsage=critical,timeStamping\n")
    openssl("x509", "-req", "-in", folder / "tsa.csr", "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key",
            "-CAcreateserial", "-out", folder / "tsa.pem", "-days", 2, "-extfile", folder / "ext")  # fmt: skip
    (folder / "serial").write_text("01\n")
    (folder / "tsa.cnf").write_text(CONFIG.format(folder))
    return folder


@pytest.fixture
def address(authority: Path) -> Iterator[str]:
    """A time-stamping authority on this machine."""

    class Stamp(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query, reply = authority / "query", authority / "reply"
            query.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
            openssl("ts", "-reply", "-config", authority / "tsa.cnf", "-section", "tsa", "-queryfile", query, "-out",
                    reply)  # fmt: skip
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply.read_bytes())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Stamp)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_heads_are_time_stamped_and_the_stamp_is_verified(
    run: Path, tmp_path: Path, authority: Path, address: str
) -> None:
    heads, root = tmp_path / "heads.json", authority / "ca.pem"
    assert command(run, "--heads", str(heads), "--stamp", address)[0] == 0
    assert token_of(heads).exists()
    code, shown = command(run, "--expect", str(heads), "--stamp-ca", str(root), "--json")
    assert code == 0
    assert "by the time stamp of CN=Test CA" in verified(heads, root)
    heads.write_text(heads.read_text() + "\n")  # another file than was stamped
    code, shown = command(run, "--expect", str(heads), "--stamp-ca", str(root), "--json")
    assert code == 3
    assert any("the time stamp of other content" in finding["what"] for finding in json.loads(shown)["findings"])


def test_a_stamp_of_another_authority_is_not_accepted(run: Path, tmp_path: Path, authority: Path, address: str) -> None:
    heads, other = tmp_path / "heads.json", tmp_path / "other.pem"
    assert command(run, "--heads", str(heads), "--stamp", address)[0] == 0
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout",
            tmp_path / "other.key", "-out", other, "-subj", "/CN=Other CA")  # fmt: skip
    with pytest.raises(StampError, match=r"its certificates do not lead to one in .*other\.pem that was valid"):
        verified(heads, other)


@pytest.fixture
def answers() -> Iterator[tuple[str, dict[str, object]]]:
    """An authority whose answers a test chooses: its address, and ``status`` and ``body`` of the next answers."""
    chosen: dict[str, object] = {"status": 200, "body": b""}

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if chosen["status"] is None:
                self.wfile.write(b"not HTTP\r\n")
                return
            self.send_response(int(str(chosen["status"])))
            self.end_headers()
            self.wfile.write(bytes(chosen["body"]))  # type: ignore[call-overload]

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", chosen
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_answer_other_than_a_time_stamp_of_the_request_is_refused_and_nothing_is_written(
    tmp_path: Path, authority: Path, address: str, answers: tuple[str, dict[str, object]]
) -> None:
    heads, earlier, (url, chosen) = tmp_path / "heads.json", tmp_path / "earlier.json", answers
    heads.write_text("heads")
    earlier.write_text("heads")
    stamp(earlier, address)
    query, refusal = tmp_path / "query", tmp_path / "refusal"
    openssl("ts", "-query", "-data", heads, "-sha256", "-tspolicy", "1.2.3.9", "-out", query)
    openssl("ts", "-reply", "-config", authority / "tsa.cnf", "-section", "tsa", "-queryfile", query, "-out",
            refusal)  # fmt: skip
    for status, body, why in (
        (500, b"", "no time stamp: HTTP Error 500"),
        (None, b"", "no time stamp: "),
        (200, b"<html>busy</html>", "not a time stamp: "),
        (200, refusal.read_bytes(), "the authority did not grant a time stamp"),
        (200, token_of(earlier).read_bytes(), "the time stamp of another request: its nonce differs"),
    ):
        chosen |= {"status": status, "body": body}
        with pytest.raises(RunError, match=f"^--stamp {url}: {why}") as caught:
            stamp(heads, url)
        assert "\n" not in str(caught.value)
        assert not token_of(heads).exists()
    with pytest.raises(RunError, match=r"^--stamp http://\[::1: no time stamp: "):
        stamp(heads, "http://[::1")


def certificate(folder: Path, name: str, until: datetime, issuer: Path | None = None) -> None:
    """A certificate for time stamps that ends at some time, with the authority's key, by an issuer or by itself."""
    key = load_pem_private_key((folder / "tsa.key").read_bytes(), None)
    signer = key if issuer is None else load_pem_private_key(issuer.with_suffix(".key").read_bytes(), None)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Test {name}")])
    by = subject if issuer is None else x509.load_pem_x509_certificate(issuer.read_bytes()).subject
    assert isinstance(key, EllipticCurvePrivateKey) and isinstance(signer, EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(by, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(until - timedelta(days=9)).not_valid_after(until)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING])
    made = builder.add_extension(usage, critical=True).sign(signer, SHA256())
    (folder / f"{name}.pem").write_bytes(made.public_bytes(Encoding.PEM))


@pytest.mark.parametrize(("name", "days", "issued"), [("expired", -1, True), ("unchained", 1, False)])
def test_a_stamp_whose_certificate_had_expired_or_does_not_chain_says_so(
    name: str, days: int, issued: bool, tmp_path: Path, authority: Path
) -> None:
    heads, root = tmp_path / "heads.json", authority / "ca.pem"
    heads.write_text("heads")
    certificate(authority, name, datetime.now(UTC) + timedelta(days=days), root if issued else None)
    config = CONFIG.format(authority).replace("tsa.pem", f"{name}.pem")
    (authority / "other.cnf").write_text(config)
    openssl("ts", "-query", "-data", heads, "-sha256", "-cert", "-out", tmp_path / "query")
    openssl("ts", "-reply", "-config", authority / "other.cnf", "-section", "tsa", "-queryfile", tmp_path / "query",
            "-out", token_of(heads))  # fmt: skip
    chain = r"its certificates do not lead to one in .* that was valid"
    with pytest.raises(StampError, match=chain) as caught:
        verified(heads, root)
    assert ("expired" in str(caught.value)) == issued


def test_an_unreachable_authority_and_options_that_do_not_fit_are_one_line(run: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads.json"
    with pytest.raises(RunError, match="no time stamp"):
        command(run, "--heads", str(heads), "--stamp", "http://127.0.0.1:1/")
    with pytest.raises(InputError, match="http:// or https://"):
        command(run, "--heads", str(heads), "--stamp", "file:///etc/passwd")
    with pytest.raises(InputError, match="together with --heads"):
        command(run, "--stamp", "http://127.0.0.1:1/")
    with pytest.raises(InputError, match="together with --expect"):
        command(run, "--stamp-ca", str(heads))
