"""Digests of files: by content, and remembered until the file changes."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

import blake3
import pytest

from fedmq.errors import InputError
from fedmq.storage import cache as digests
from fedmq.storage.cache import file_digest, file_digests


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))


def made(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    seen, read = list[Path](), digests.read_digest

    def note(path: Path) -> object:
        seen.append(path)
        return read(path)

    monkeypatch.setattr(digests, "read_digest", note)
    return seen


def test_the_digest_is_blake3_of_the_bytes_and_an_unchanged_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, files = reads(monkeypatch), [made(tmp_path / f"{i}", bytes([i]) * 3_000_000) for i in range(3)]
    expected = [blake3.blake3(file.read_bytes()).hexdigest() for file in files]
    done: list[int] = []
    assert file_digests(files, done.append) == expected
    assert done[-1] == 3
    monkeypatch.chdir(tmp_path)
    assert file_digests([Path("2"), *files]) == [expected[2], *expected]
    assert len(seen) == 3


def test_a_file_rewritten_in_place_with_its_old_size_and_time_is_read_again(tmp_path: Path) -> None:
    file = made(tmp_path / "a", b"one")
    os.utime(file, (0, 0))
    before = file_digests([file])
    with file.open("r+b") as opened:
        opened.write(b"two")
    os.utime(file, (0, 0))
    assert file_digests([file]) == [blake3.blake3(b"two").hexdigest()] != before


def test_an_unchanged_file_is_read_once_for_its_sha256_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, hashed = made(tmp_path / "a", b"one"), list[str]()
    assert file_digests([file]) == [blake3.blake3(b"one").hexdigest()]
    real = hashlib.file_digest
    monkeypatch.setattr(digests.hashlib, "file_digest", lambda opened, name: hashed.append(name) or real(opened, name))
    assert file_digest(file) == file_digest(file) == hashlib.sha256(b"one").hexdigest()
    assert hashed == ["sha256"]
    file.write_bytes(b"two, longer")
    assert file_digest(file) == hashlib.sha256(b"two, longer").hexdigest()
    assert file_digests([file]) == [blake3.blake3(b"two, longer").hexdigest()]


@pytest.mark.parametrize("damage", ["a folder", "no database", "another table"])
def test_without_a_usable_memory_files_are_read_each_time(tmp_path: Path, damage: str) -> None:
    place = tmp_path / "cache" / "file_digests.sqlite"
    if damage == "a folder":
        place.mkdir(parents=True)
    elif damage == "no database":
        made(place, b"x" * 5000)
    else:
        place.parent.mkdir()
        with sqlite3.connect(place) as opened:
            opened.execute("CREATE TABLE digests (path TEXT)")
    file = made(tmp_path / "a", b"one")
    assert file_digests([file]) == file_digests([file]) == [blake3.blake3(b"one").hexdigest()]


@pytest.mark.parametrize("digest", ["0" * 64, "0" * 128, None])
def test_a_damaged_digest_is_not_used(tmp_path: Path, digest: object) -> None:
    file = made(tmp_path / "a", b"one")
    expected = file_digests([file])
    with sqlite3.connect(tmp_path / "cache" / "file_digests.sqlite") as opened:
        opened.execute("UPDATE digests SET digest = ?", (digest,))
    assert file_digests([file]) == expected


def test_pipes_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "no regular file"), (".", "no regular file"), ("x", "No such file"), ("\0", "null")):
        with pytest.raises(InputError, match=reason):
            file_digests([tmp_path / name])
