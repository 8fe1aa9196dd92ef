"""Keys made where they are used: requests, acceptance, rotation, passphrases, and the folder of accepted keys."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmq.cli.main import app
from fedmq.errors import InputError
from fedmq.wire.key_requests import (
    Acceptance,
    KeyRequest,
    acceptance_of,
    make_roster,
    new_request,
    read_request,
    read_roster,
    statement_of,
)
from fedmq.wire.keys import (
    PASSPHRASE_FILE_VARIABLE,
    PASSPHRASE_VARIABLE,
    accept_key,
    init_keys,
    is_encrypted,
    load_accepted,
    load_identity,
    revoke,
    words,
)


def accept(folder: Path, request: KeyRequest) -> None:
    accept_key(folder, request.name, request.public_key)


def accepted_words(folder: Path, name: str) -> str:
    return words(load_accepted(folder)[name])


def test_a_key_made_at_a_site_is_accepted_by_its_request_and_its_words_are_the_same_at_both_ends(
    tmp_path: Path,
) -> None:
    site, coordinator = tmp_path / "site", tmp_path / "coordinator"
    path, _ = new_request(site, "silo-03")
    request = read_request(path)
    assert acceptance_of(coordinator, path, request) is Acceptance.NEW
    accept(coordinator, request)
    assert acceptance_of(coordinator, path, request) is Acceptance.KNOWN
    assert accepted_words(coordinator, "silo-03") == words(load_identity(site, "silo-03"))
    assert len(words(load_identity(site, "silo-03")).split()) == 8
    assert (site / "silo-03.key").stat().st_mode & 0o777 == 0o600
    assert "PRIVATE" not in path.read_text()


def test_a_rotated_key_replaces_the_accepted_one_only_with_a_signature_by_that_one(tmp_path: Path) -> None:
    site, coordinator = tmp_path / "site", tmp_path / "coordinator"
    first, _ = new_request(site, "silo-03")
    accept(coordinator, read_request(first))
    before = accepted_words(coordinator, "silo-03")
    path, _ = new_request(site, "silo-03", replace=True)
    request = read_request(path)
    assert acceptance_of(coordinator, path, request) is Acceptance.REPLACES
    accept(coordinator, request)
    assert accepted_words(coordinator, "silo-03") == words(load_identity(site, "silo-03")) != before
    assert len(list((coordinator / "revoked").glob("silo-03-*.pub"))) == 1
    stranger, _ = new_request(tmp_path / "stranger", "silo-03")
    with pytest.raises(InputError, match=r"another key is accepted .*--replace"):
        acceptance_of(coordinator, stranger, read_request(stranger))


def test_a_changed_request_is_refused(tmp_path: Path) -> None:
    new_request(tmp_path / "site", "silo-03")
    path, _ = new_request(tmp_path / "site", "silo-03", replace=True)
    other, _ = new_request(tmp_path / "other", "silo-04")
    new_request(tmp_path / "other", "silo-05")
    theirs, _ = new_request(tmp_path / "other", "silo-05", replace=True)
    made = json.loads(path.read_text())
    for field in ("name", "key", "replaces", "signature", "replaced_signature"):
        foreign = json.loads((theirs if field.startswith("replace") else other).read_text())[field]
        path.write_text(json.dumps(made | {field: foreign}))
        with pytest.raises(InputError, match="wrong signature"):
            read_request(path)


def test_a_file_that_is_not_a_request_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "x.request"
    for text in ("", "{", "[]", '{"key_request": 2}', "x" * 5000, '{"key_request": 1, "name": "../a"}'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"fedmq keys new|allowed"):
            read_request(path)
    os.mkfifo(tmp_path / "pipe.request")
    for place in (tmp_path, tmp_path / "none.request", tmp_path / "pipe.request"):
        with pytest.raises(InputError, match=r"fedmq keys new"):
            read_request(place)


def test_one_key_cannot_be_accepted_for_two_names(tmp_path: Path) -> None:
    path, _ = new_request(tmp_path / "site", "silo-03")
    accept(tmp_path / "c", read_request(path))
    key = load_identity(tmp_path / "site", "silo-03").key
    (tmp_path / "site" / "silo-04.key").write_bytes((tmp_path / "site" / "silo-03.key").read_bytes())
    (tmp_path / "site" / "silo-04.key").chmod(0o600)

    public = key.public_key().public_bytes_raw().hex()
    twin = KeyRequest(
        key_request=1, name="silo-04", key=public, signature=key.sign(statement_of("silo-04", public, None)).hex()
    )
    with pytest.raises(InputError, match="the key of silo-03 for silo-04"):
        accept(tmp_path / "c", twin)


def test_a_present_key_is_not_overwritten(tmp_path: Path) -> None:
    new_request(tmp_path, "silo-03")
    before = (tmp_path / "silo-03.key").read_bytes()
    with pytest.raises(InputError, match=r"an existing key.*--replace"):
        new_request(tmp_path, "silo-03")
    assert (tmp_path / "silo-03.key").read_bytes() == before


def test_an_encrypted_key_needs_its_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_request(tmp_path, "silo-03", b"open sesame")
    assert b"ENCRYPTED" in (tmp_path / "silo-03.key").read_bytes()
    monkeypatch.delenv(PASSPHRASE_VARIABLE, raising=False)
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match=PASSPHRASE_VARIABLE):
        load_identity(tmp_path, "silo-03")
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "close sesame")
    with pytest.raises(InputError, match="another passphrase"):
        load_identity(tmp_path, "silo-03")
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "open sesame")
    assert load_identity(tmp_path, "silo-03").name == "silo-03"
    shown = CliRunner().invoke(app, ["keys", "new", "--keys", str(tmp_path), "silo-04"])
    assert "the private key is not encrypted" in shown.output and "sesame" not in shown.output
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "\udcff")  # a byte that is not UTF-8
    new_request(tmp_path, "silo-05", b"\xff")
    assert load_identity(tmp_path, "silo-05").name == "silo-05"


def test_a_passphrase_comes_from_a_file_that_its_owner_alone_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, keys = tmp_path / "secret", tmp_path / "keys"
    secret.write_text("open sesame\nsecond line\n")
    secret.chmod(0o600)
    monkeypatch.delenv(PASSPHRASE_VARIABLE, raising=False)
    monkeypatch.setattr("sys.stdin", None)
    new = ("keys", "new", "--keys", str(keys))
    shown = CliRunner().invoke(app, [*new, "silo-03", "--passphrase-file", str(secret)])
    assert shown.exit_code == 0 and "sesame" not in shown.output
    assert b"ENCRYPTED" in (keys / "silo-03.key").read_bytes()
    with pytest.raises(InputError, match=PASSPHRASE_FILE_VARIABLE):
        load_identity(keys, "silo-03")
    monkeypatch.setenv(PASSPHRASE_FILE_VARIABLE, str(secret))
    assert load_identity(keys, "silo-03").name == "silo-03"
    shown = CliRunner().invoke(app, [*new, "silo-04", "--passphrase"])  # not requested
    assert shown.exit_code == 0 and "sesame" not in shown.output
    assert load_identity(keys, "silo-04").name == "silo-04"
    assert CliRunner().invoke(app, [*new, "silo-04", "--replace"]).exit_code == 0
    assert is_encrypted(keys, "silo-04") and load_identity(keys, "silo-04").name == "silo-04"
    monkeypatch.delenv(PASSPHRASE_FILE_VARIABLE)
    shown = CliRunner().invoke(app, [*new, "silo-05", "--passphrase"])
    assert isinstance(shown.exception, InputError) and PASSPHRASE_VARIABLE in str(shown.exception)
    assert not (keys / "silo-05.key").exists()
    monkeypatch.setenv(PASSPHRASE_FILE_VARIABLE, str(secret))
    for content, mode, what in (
        ("open sesame", 0o644, "chmod 600"),
        ("", 0o600, "an empty passphrase"),
        ("x" * 2000, 0o600, "a longer passphrase"),
        ("close sesame", 0o600, "another passphrase"),
    ):
        secret.write_text(content)
        secret.chmod(mode)
        with pytest.raises(InputError, match=what) as refused:
            load_identity(keys, "silo-03")
        assert "sesame" not in str(refused.value)
    secret.unlink()
    with pytest.raises(InputError, match="No such file"):
        load_identity(keys, "silo-03")


# ------------------------------------------------------------------------------------------ the folder while running
def test_a_running_process_sees_keys_that_come_and_go(tmp_path: Path) -> None:
    init_keys(tmp_path, ("coordinator", "silo-00"))
    accepted = load_accepted(tmp_path)
    assert accepted.refresh() == []
    path, _ = new_request(tmp_path / "site", "silo-01")
    accept(tmp_path, read_request(path))
    assert accepted.refresh() == []
    assert set(accepted) == {"coordinator", "silo-00", "silo-01"}
    revoke(tmp_path, "silo-00")
    assert accepted.refresh() == ["silo-00"]
    assert set(accepted) == {"coordinator", "silo-01"}
    assert accepted.refresh() == []


def test_a_replaced_or_damaged_key_and_a_removed_one_are_no_longer_accepted(tmp_path: Path) -> None:
    init_keys(tmp_path, ("coordinator", "silo-00", "silo-01"))
    init_keys(tmp_path / "other", ("coordinator", "silo-00"))
    accepted, folder = load_accepted(tmp_path), tmp_path / "accepted"
    (folder / "silo-00.pub").write_bytes((tmp_path / "other/accepted/silo-00.pub").read_bytes())
    assert accepted.refresh() == ["silo-00"]
    assert accepted["silo-00"] == load_accepted(tmp_path / "other")["silo-00"]
    assert accepted.refresh() == []
    (folder / "silo-01.pub").write_bytes(b"not a key")
    (folder / "silo-00.pub").unlink()
    assert accepted.refresh() == ["silo-00"]
    assert set(accepted) == {"coordinator", "silo-01"}
    assert "silo-01.pub" in accepted.problem


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("place", ["accepted", "accepted/silo-00.pub"])
def test_accepted_keys_of_another_user_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, *, linked: bool
) -> None:
    init_keys(tmp_path, ("silo-00",))
    path = tmp_path / place
    if linked:
        target = path.rename(tmp_path / "target")
        path.symlink_to(target)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    owner = path.stat().st_uid
    assert set(load_accepted(tmp_path)) == {"silo-00"}  # by root, or by the owner
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(InputError, match=f"user {owner} as the owner.*chown"):
        load_accepted(tmp_path)


@pytest.mark.parametrize("place", ["accepted", "accepted/silo-00.pub"])
def test_accepted_keys_that_anyone_can_replace_are_refused(tmp_path: Path, place: str) -> None:
    init_keys(tmp_path, ("silo-00",))
    (tmp_path / place).chmod(0o777)
    with pytest.raises(InputError, match=r"mode 0777.*chmod go-w"):
        load_accepted(tmp_path)


# --------------------------------------------------------------------------------------------------- the commands
def test_the_commands_make_accept_show_and_remove_a_key(tmp_path: Path) -> None:
    def fedmq(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["keys", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.output

    made = fedmq("new", "silo-03", "--keys", tmp_path / "site")
    spoken = words(load_identity(tmp_path / "site", "silo-03"))
    assert spoken in made
    assert spoken in fedmq("accept", tmp_path / "keys", tmp_path / "site" / "silo-03.request")
    assert "accepted already" in fedmq("accept", tmp_path / "keys", tmp_path / "site" / "silo-03.request")
    assert spoken in fedmq("show", tmp_path / "keys")
    fedmq("remove", "silo-03", "--keys", tmp_path / "keys")
    assert fedmq("show", tmp_path / "keys") == ""
    assert "simulations" in fedmq("init", tmp_path / "all", "--silos", 2)


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Folders of keys of a coordinator and two sites, and their roster."""
    for name in ("coordinator", "silo-00", "silo-01"):
        new_request(tmp_path / name, name)
    requests = [str(tmp_path / name / f"{name}.request") for name in ("silo-00", "silo-01")]
    arguments = ["keys", "roster", str(tmp_path / "roster"), *requests, "--keys", str(tmp_path / "coordinator")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return tmp_path


def test_a_roster_is_accepted_as_a_whole_and_has_the_same_words_everywhere(sites: Path) -> None:
    printed = set()
    for name in ("coordinator", "silo-00", "silo-01"):
        result = CliRunner().invoke(app, ["keys", "accept", str(sites / name), str(sites / "roster")])
        assert result.exit_code == 0, result.output
        (line,) = (line for line in result.output.splitlines() if "words of the roster" in line)
        printed.add(line)
        assert set(load_accepted(sites / name)) == {"coordinator", "silo-00", "silo-01"}
    assert len(printed) == 1 and len(printed.pop().split()) == 4 + 12
    assert accepted_words(sites / "silo-00", "silo-01") == words(load_identity(sites / "silo-01", "silo-01"))


def test_a_roster_that_was_changed_or_has_an_invented_key_is_refused(sites: Path) -> None:
    good = json.loads((sites / "roster").read_text())
    _, invented = new_request(sites / "invented", "silo-00")
    requests = [invented.plain() if each["name"] == "silo-00" else each for each in good["requests"]]
    forged = make_roster(
        sites / "forged",
        sites / "coordinator",
        "coordinator",
        [sites / "invented" / "silo-00.request", sites / "silo-01" / "silo-01.request"],
    )
    for changed, text in (
        (good | {"signature": "00" * 64}, "wrong signature"),
        (good | {"requests": requests}, "wrong signature"),
        (good | {"requests": [*good["requests"], good["requests"][0]]}, "two keys of one name"),
        (good | {"requests": good["requests"][1:]}, "none of its signer"),
        (forged.plain(), "another key of silo-00 than in"),
    ):
        (sites / "other").write_text(json.dumps(changed))
        with pytest.raises(InputError, match=text):
            read_roster(sites / "other", sites / "silo-00")
    # The other site has no key by which it could tell; the words of the roster differ.
    assert (
        read_roster(sites / "forged", sites / "silo-01").words != read_roster(sites / "roster", sites / "silo-00").words
    )
