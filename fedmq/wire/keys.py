"""Identities of processes: Ed25519 key files, created, loaded and revoked."""

from __future__ import annotations

import contextlib
import errno
import getpass
import hashlib
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from mnemonic import Mnemonic

from fedmq.errors import InputError
from fedmq.storage.regular_files import open_regular, read_regular
from fedmq.storage.run_folder import write_atomically, writing
from fedmq.text import printable
from fedmq.wire.fields import NAME
from fedmq.wire.sessions import KEY_BYTES

_ACCEPTED = "accepted"
_REVOKED = "revoked"
_ENCRYPTED = b"ENCRYPTED PRIVATE KEY"
#: Environment variables with the passphrase of an encrypted private key, or with the file that holds it.
PASSPHRASE_VARIABLE, PASSPHRASE_FILE_VARIABLE = "FEDMQ_KEY_PASSPHRASE", "FEDMQ_KEY_PASSPHRASE_FILE"
_LONGEST_PASSPHRASE = 1024
#: Maximum size of a key file [bytes].
_LARGEST_KEY = 4096
#: The prime of Curve25519, and the y coordinates of its points of order 1, 2, 4 and 8, as libsodium lists them.
_PRIME = 2**255 - 19
_Y_OF_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER = frozenset({0, 1, _PRIME - 1, _Y_OF_ORDER_8, _PRIME - _Y_OF_ORDER_8})
#: Words of a fingerprint, 11 bits each.
_WORDS = 8


@dataclass(frozen=True)
class Identity:
    """A process's name and its private signing key."""

    name: str
    key: Ed25519PrivateKey


def init_keys(directory: Path, names: Iterable[str]) -> None:
    """Create a key pair per name: ``NAME.key`` (PKCS8 PEM, mode 0600) and ``accepted/NAME.pub`` (SPKI PEM).

    Nothing is written if any of the keys, private or public, already exists.

    Raises:
        InputError: a name is not allowed, is given twice, or already has a key; or the folder cannot be written.
        RunError: the disk is full or broken.
    """
    requested = list(names)
    if len(set(requested)) != len(requested):
        raise InputError(str(directory), requested, "distinct names")
    for name in requested:
        _check_key_name(directory, name)
        for path in (directory / f"{name}.key", directory / _ACCEPTED / f"{name}.pub"):
            if path.exists():
                allowed = "a folder without keys; `fedmq keys new NAME` adds a single one"
                raise InputError(str(path), "an existing key", allowed)
    written: list[Path] = []
    try:
        _make_folders(directory)
        for name in requested:
            key = Ed25519PrivateKey.generate()
            private, public = directory / f"{name}.key", directory / _ACCEPTED / f"{name}.pub"
            _write(private, _private_pem(key), 0o600)
            written.append(private)
            _write(public, public_pem(key.public_key()), 0o644)
            written.append(public)
    except BaseException:
        for path in written:  # the next attempt would stop at an existing key
            path.unlink(missing_ok=True)
        raise


def _make_folders(directory: Path) -> None:
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / _ACCEPTED).mkdir(exist_ok=True, mode=0o755)


def private_names(directory: Path) -> list[str]:
    """Names of the private keys of a folder, sorted; none of a folder that does not exist."""
    return sorted(path.stem for path in directory.glob("*.key"))


def is_encrypted(directory: Path, name: str) -> bool:
    """Whether a private key is encrypted with a passphrase.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    return _ENCRYPTED in read_regular(directory / f"{name}.key", "a readable key file", _LARGEST_KEY)


def load_identity(directory: Path, name: str) -> Identity:
    """Load a private key.

    Raises:
        InputError: the file is missing, readable by others, or not an Ed25519 private key in PKCS8 PEM.
    """
    _check_key_name(directory, name)
    path = directory / f"{name}.key"
    if not os.path.lexists(path):
        where = "" if directory == Path("keys") else f" --keys {shlex.quote(str(directory))}"
        held = ", ".join(private_names(directory))
        found = f"no such file; this folder has the private key of {held}" if held else "no such file"
        raise InputError(str(path), found, f"a private key: `fedmq keys new {name}{where}` makes it")
    return identity_of(name, _read_private(path, "a readable key file", _LARGEST_KEY), path)


def _read_private(path: Path, allowed: str, most: int | None = None) -> bytes:
    """The first bytes of a file that only its owner can read."""
    with open_regular(path, allowed, most) as file:
        if (mode := os.fstat(file.fileno()).st_mode & 0o777) & 0o077:
            raise InputError(str(path), f"mode {mode:04o}", f"mode 0600: run `chmod 600 {path}`")
        return file.read(_LARGEST_KEY)


def identity_of(name: str, raw: bytes, path: Path) -> Identity:
    """A process's identity from the content of its private key's file, an Ed25519 private key in PKCS8 PEM.

    Raises:
        InputError: it is another content, or encrypted with another passphrase.
    """
    encrypted = _ENCRYPTED in raw
    try:
        key = serialization.load_pem_private_key(raw, password=_passphrase(path) if encrypted else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if encrypted:
            raise InputError(str(path), "another passphrase", "the passphrase of this key") from None
        raise InputError(str(path), "a file that is not a private key", "an Ed25519 key in PKCS8 PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(str(path), type(key).__name__, "an Ed25519 key in PKCS8 PEM")
    return Identity(name, key)


class AcceptedKeys(Mapping[str, Ed25519PublicKey]):
    """The accepted public keys of a folder, ``accepted/NAME.pub``, by name; :meth:`refresh` reads them again.

    Args:
        directory: the folder.
        only: read only the key of this name; None reads all.

    Raises:
        InputError: the folder is missing or can be written by another user, a file is not an Ed25519 public key, or two
            names share a key.
    """

    def __init__(self, directory: Path, only: str | None = None) -> None:
        self._folder, self._only = directory / _ACCEPTED, only
        self._files: dict[str, tuple[int, int, int]] | None = None
        with contextlib.suppress(OSError):  # the next refresh lists it
            self._files = self._present()
        self._keys = _read_accepted(directory, only)
        self.problem = ""  # why the folder could not be read completely at the last refresh; empty if it could

    def __getitem__(self, name: str) -> Ed25519PublicKey:
        return self._keys[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def values(self) -> ValuesView[Ed25519PublicKey]:
        """The accepted keys as of now; other threads may iterate over them while the folder is read again."""
        return self._keys.values()

    def refresh(self) -> list[str]:
        """Read the folder again if a file changed; returns the names whose keys have been removed or replaced.

        If a file cannot be read, present keys stay accepted, except those whose files are gone. If the folder cannot be
        listed, for example because this process has too many open files, all keys stay accepted and the next call tries
        again.
        """
        before = self._keys
        try:
            files = self._present()
            if files == self._files:
                return []
            self._keys, self.problem = _read_accepted(self._folder.parent, self._only), ""
        except OSError as error:
            self._files, self.problem = None, f"{self._folder}: {error.strerror}; the keys read before stay accepted"
            return []
        except InputError as error:
            self._keys = {name: key for name, key in before.items() if name in files}
            self.problem = str(error)
        self._files = files
        return sorted(name for name, key in before.items() if self._keys.get(name) != key)

    def _present(self) -> dict[str, tuple[int, int, int]]:
        """Inode, time and size of each key file, by name; empty if the folder is gone."""
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                name, dot, suffix = entry.name.rpartition(".")
                if dot and suffix == "pub" and self._only in (None, name):
                    try:
                        state = entry.stat()
                    except OSError as error:
                        if error.errno not in (errno.ENOENT, errno.ELOOP):  # removed meanwhile, or a circular link
                            raise
                    else:
                        found[name] = (state.st_ino, state.st_mtime_ns, state.st_size)
        return found


def load_accepted(directory: Path, only: str | None = None) -> AcceptedKeys:
    """Load the accepted public keys, ``accepted/NAME.pub``, by name; arguments and errors of :class:`AcceptedKeys`."""
    return AcceptedKeys(directory, only)


def _read_accepted(directory: Path, only: str | None) -> dict[str, Ed25519PublicKey]:
    folder = directory / _ACCEPTED
    if not folder.is_dir():
        raise InputError(str(folder), "no such folder", "a folder of accepted keys; `fedmq keys accept` makes it")
    accepted: dict[str, Ed25519PublicKey] = {}
    holders: dict[bytes, str] = {}
    _refuse_writable(folder)
    for path in sorted(folder.glob("*.pub" if only is None else f"{only}.pub")):
        name = path.stem
        _check_key_name(folder, name)
        _refuse_writable(path)
        key = _public_key(path)
        holder = holders.setdefault(key.public_bytes_raw(), name)
        if holder != name:
            raise InputError(str(path), f"the same key as {holder}", "a different key for each name")
        accepted[name] = key
    return accepted


def _refuse_writable(path: Path) -> None:
    """Refuse a file that others can write: with their own key in it they could join the run under its name."""
    try:
        found = path.stat()
    except OSError as error:  # for example a link that leads nowhere, or to itself
        raise InputError(str(path), error.strerror or str(error), "a readable key file") from None
    if found.st_mode & 0o022:
        mode = f"mode {found.st_mode & 0o777:04o}"
        raise InputError(str(path), mode, f"what others cannot write: run `chmod go-w {path}`")
    user = os.geteuid()
    if user != 0 and found.st_uid not in (0, user):  # root's processes read what users mount into a container
        owner = f"user {found.st_uid} as the owner, who can replace the accepted keys"
        raise InputError(str(path), owner, f"what user {user}, who runs this process, or root owns: run `chown`")


def _public_key(path: Path) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(read_regular(path, "a readable key file", _LARGEST_KEY))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(str(path), "a file that is not a public key", "an Ed25519 public key in PEM") from error
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(str(path), type(key).__name__, "an Ed25519 public key in PEM")
    try:
        return public_key_of(key.public_bytes_raw())
    except ValueError as error:
        raise InputError(str(path), str(error), "an Ed25519 public key in PEM") from None


def public_key_of(raw: bytes) -> Ed25519PublicKey:
    """A public key from its 32 bytes, if only the holder of a private key can sign with it.

    The key's point must not have a small order (1, 2, 4 or 8): for such a key anybody can make valid signatures.

    Raises:
        ValueError: the key is a point of small order, or its encoding is not canonical.
    """
    key = Ed25519PublicKey.from_public_bytes(raw)
    y = int.from_bytes(raw, "little") % (1 << 255)  # without the sign of x
    if y >= _PRIME:
        raise ValueError("an encoding of a public key that is not canonical")
    if y in _SMALL_ORDER:
        raise ValueError("a point of small order, for which anybody can sign without a private key")
    return key


def accept_key(directory: Path, name: str, key: Ed25519PublicKey) -> None:
    """Accept a public key under a name; a key that the name has is moved to ``revoked/``.

    Raises:
        InputError: another name has this key, or the folder cannot be written.
        RunError: the disk is full or broken.
    """
    _check_key_name(directory, name)
    _make_folders(directory)
    accepted = load_accepted(directory)
    for other, present in accepted.items():
        if other != name and present.public_bytes_raw() == key.public_bytes_raw():
            raise InputError(str(directory), f"the key of {other} for {name}", "a different key for each name")
    if name in accepted:
        _archive(directory, name, accepted[name])
    # Atomically, since a running process may be watching the folder.
    write_atomically(directory / _ACCEPTED / f"{name}.pub", lambda path: _write(path, public_pem(key), 0o644))


def _archive(directory: Path, name: str, key: Ed25519PublicKey) -> None:
    """Copy a public key to ``revoked/``; with the fingerprint in the file name, a name can have several there."""
    kept = directory / _REVOKED / f"{name}-{fingerprint(key)[:16]}.pub"
    with writing(kept):
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(public_pem(key))


def new_key(directory: Path, name: str, passphrase: bytes | None = None, *, replace: bool = False) -> Identity:
    """Create a private key, ``NAME.key`` (PKCS8 PEM, mode 0600).

    Args:
        directory: created if missing.
        name: name of the process.
        passphrase: encrypts the file; None leaves it in clear.
        replace: whether to overwrite the name's present key.

    Raises:
        InputError: the name is not allowed or has a key, or the folder cannot be written.
        RunError: the disk is full or broken.
    """
    _check_key_name(directory, name)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path, key = directory / f"{name}.key", Ed25519PrivateKey.generate()
    if replace:
        write_atomically(path, lambda temporary: _write(temporary, _private_pem(key, passphrase), 0o600))
    else:
        allowed = "--replace, which makes a new one in its place, or another name"
        _write(path, _private_pem(key, passphrase), 0o600, allowed)
    return Identity(name, key)


def revoke(directory: Path, name: str) -> None:
    """Revoke a name's key: move its public key to ``revoked/``, where the file name records its fingerprint.

    Raises:
        InputError: the name has no accepted key, or the folder cannot be written.
    """
    _check_key_name(directory, name)
    path = directory / _ACCEPTED / f"{name}.pub"
    if not path.is_file():
        raise InputError(str(path), "no such key", "the name of an accepted key")
    _archive(directory, name, load_accepted(directory)[name])
    with writing(path):
        path.unlink()


def former_keys(directory: Path) -> dict[str, list[Ed25519PublicKey]]:
    """The keys in ``revoked/``, by name: accepted before they were replaced or removed.

    Raises:
        InputError: a file is not an Ed25519 public key.
    """
    found: dict[str, list[Ed25519PublicKey]] = {}
    for path in sorted((directory / _REVOKED).glob("*.pub")):
        found.setdefault(path.stem.rpartition("-")[0], []).append(_public_key(path))
    return found


def fingerprint(key: Ed25519PublicKey | Identity) -> str:
    """SHA-256 of the 32 raw bytes of a public key, in hexadecimal."""
    public = key.key.public_key() if isinstance(key, Identity) else key
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()


def words(key: Ed25519PublicKey | Identity) -> str:
    """The first 88 bits of a fingerprint as eight words of the BIP 39 list, to be compared over the telephone."""
    return words_of(fingerprint(key))


def words_of(digest: str, count: int = _WORDS) -> str:
    """The first bits of a SHA-256 (hex) as words, 11 bits each."""
    listed = Mnemonic("english").wordlist
    bits = int(digest, 16) >> (256 - 11 * count)
    return " ".join(listed[bits >> 11 * place & 2047] for place in reversed(range(count)))


def noise_key(identity: Identity) -> bytes:
    """Derive a secret of 32 bytes from a private key, for the noise on a silo's updates (HKDF, RFC 5869)."""
    derivation = HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=b"fedmq noise of updates")
    return derivation.derive(identity.key.private_bytes_raw())


def _check_key_name(place: Path, name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise InputError(str(place), name, f"a name of the form {NAME.pattern}")


def given_passphrase() -> bytes | None:
    """The passphrase from the environment, or from the file that it names; None without either.

    Raises:
        InputError: it is empty, or the file cannot be read.
    """
    given, file = os.environ.get(PASSPHRASE_VARIABLE), os.environ.get(PASSPHRASE_FILE_VARIABLE)
    if given is not None:
        return checked_passphrase(PASSPHRASE_VARIABLE, os.fsencode(given))  # any bytes, as in a file
    return None if file is None else passphrase_in(Path(file))


def passphrase_variable() -> str | None:
    """The environment variable that gives a passphrase; None if neither is set."""
    return next((name for name in (PASSPHRASE_VARIABLE, PASSPHRASE_FILE_VARIABLE) if name in os.environ), None)


def passphrase_in(file: Path) -> bytes:
    """The passphrase in a file: its first line.

    Raises:
        InputError: the file cannot be read, or others can, or it has no or a longer line.
    """
    raw = _read_private(file, "a readable file with the passphrase in its first line")
    return checked_passphrase(str(file), raw.partition(b"\n")[0].removesuffix(b"\r"))


def checked_passphrase(place: str, given: bytes) -> bytes:
    """A passphrase, if its length is allowed; an error names the length alone.

    Raises:
        InputError: it is empty or too long.
    """
    if not 0 < len(given) <= _LONGEST_PASSPHRASE:
        found = "an empty passphrase" if not given else "a longer passphrase"
        raise InputError(place, found, f"1 to {_LONGEST_PASSPHRASE} bytes")
    return given


def _passphrase(path: Path) -> bytes:
    """The passphrase of an encrypted key, from the environment, a file or the terminal."""
    given = given_passphrase()
    if given is None and sys.stdin is not None and sys.stdin.isatty():
        given = getpass.getpass(f"passphrase of {printable(str(path))}: ").encode()
    if given is None:
        allowed = f"its passphrase in {PASSPHRASE_VARIABLE}, in a file that {PASSPHRASE_FILE_VARIABLE} names, or typed"
        raise InputError(str(path), "an encrypted key", allowed)
    return given


def _private_pem(key: Ed25519PrivateKey, passphrase: bytes | None = None) -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        encryption = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def public_pem(key: Ed25519PublicKey) -> bytes:
    """A public key as SPKI PEM."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _write(path: Path, raw: bytes, mode: int, allowed: str = "a folder without that key") -> None:
    """Create a file with ``mode`` from the start; a failed write leaves no file."""
    with writing(path):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            raise InputError(str(path), "an existing key", allowed) from None
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(raw)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
