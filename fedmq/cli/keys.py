"""``fedmq keys``: the keys of the processes of a run; ``fedmq sign`` and ``verify``: signatures of released models."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmq.cli.console import DIFFERENT
from fedmq.cli.options import AsJson, Keys
from fedmq.errors import InputError
from fedmq.launch.interrupts import FAILED
from fedmq.text import print_json, print_line

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

keys_app = typer.Typer(
    help="Create, accept, show and remove the keys with which the processes of a run authenticate each other.\n\n"
    "Example: [bold]fedmq keys new silo-03[/bold]",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

#: Names of the processes of a run.
_USUAL = re.compile(r"silo-\d{2,4}|coordinator|evaluator")
_Directory = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="Folder of keys.")]
_Keys = Annotated[Path, typer.Option("--keys", metavar="DIR", help="Folder of keys.")]


@keys_app.command("new")
def keys_new(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="silo-03, coordinator, evaluator.")],
    keys: _Keys = Path("keys"),
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Replace the current key, which signs the request; if it is encrypted, so is the new one."
        ),
    ] = False,
    passphrase: Annotated[
        bool,
        typer.Option(
            "--passphrase",
            help=(
                "Encrypt the private key with the passphrase in FEDMQ_KEY_PASSPHRASE or in the file that "
                "FEDMQ_KEY_PASSPHRASE_FILE names; otherwise the command asks for one."
            ),
        ),
    ] = False,
    passphrase_file: Annotated[
        Path | None,
        typer.Option(
            "--passphrase-file", metavar="FILE", help="Encrypt the private key with the first line of a file."
        ),
    ] = None,
) -> None:
    """Create a private key where it will be used, and a request to accept it.

    The request is not secret: send it to the operator of the other end, and read out the words over the telephone.

    Example: [bold]fedmq keys new silo-03[/bold]
    """
    from fedmq.wire.key_requests import new_request  # noqa: PLC0415
    from fedmq.wire.keys import given_passphrase, is_encrypted, passphrase_in, passphrase_variable  # noqa: PLC0415

    secret = None if passphrase_file is None else passphrase_in(passphrase_file)
    if secret is None and (passphrase or (replace and is_encrypted(keys, name))):
        secret = given_passphrase() or _typed_passphrase()
    if not _USUAL.fullmatch(name):
        print_line(
            f"{name} is not the name of a process of a run: these are silo-00, silo-01, ..., coordinator and evaluator;"
            " with another name one can only ask for the status",
            error=True,
        )
    path, request = new_request(keys, name, secret, replace=replace)
    print_line(f"private key {keys / name}.key: keep it on this machine, readable by you only")
    if secret is None and (variable := passphrase_variable()) is not None:
        print_line(f"the private key is not encrypted: --passphrase encrypts it with the one in {variable}", error=True)
    print_line(f"request     {path}: send it to the other end, where `fedmq keys accept` reads it")
    _print_fingerprint(request.public_key)


def _typed_passphrase() -> bytes:
    """Ask for a passphrase, twice."""
    if sys.stdin is None or not sys.stdin.isatty():
        allowed = "one in FEDMQ_KEY_PASSPHRASE, in a file that FEDMQ_KEY_PASSPHRASE_FILE names, or typed on a terminal"
        raise InputError("keys new", "no passphrase", allowed)
    return str(typer.prompt("passphrase", hide_input=True, confirmation_prompt=True)).encode()


@keys_app.command("accept")
def keys_accept(
    directory: _Directory,
    requests: Annotated[
        list[Path], typer.Argument(metavar="REQUEST...", show_default=False, help="Files made by fedmq keys new.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether the words are right.")] = False,
) -> None:
    """Accept the keys of requests, or of a roster. Compare the words with those that the other end reads out.

    A running coordinator applies the change within a second. On a terminal, each key is accepted after a confirmation,
    all keys of a roster after one; the exit code is 1 if one was not confirmed.

    Example: [bold]fedmq keys accept keys silo-03.request[/bold]
    """
    from fedmq.wire.key_requests import Acceptance, acceptance_of, is_roster, read_request  # noqa: PLC0415
    from fedmq.wire.keys import accept_key  # noqa: PLC0415

    rosters = [path for path in requests if is_roster(path)]
    answers = [_accepted_all(directory, path, yes=yes) for path in rosters]
    refused = not all(answers)
    for path, request in [(path, read_request(path)) for path in requests if path not in rosters]:
        what = acceptance_of(directory, path, request)
        print_line(f"{request.name}{', replaces its accepted key' if what is Acceptance.REPLACES else ''}")
        _print_fingerprint(request.public_key)
        if what is Acceptance.KNOWN:
            print_line("  is accepted already")
        elif yes or not sys.stdin.isatty() or typer.confirm("  Does the other end read out the same words?"):
            accept_key(directory, request.name, request.public_key)
            print_line("  accepted")
        else:
            print_line("  not accepted")
            refused = True
    if refused:
        sys.exit(FAILED)


def _accepted_all(directory: Path, path: Path, *, yes: bool) -> bool:
    """Accept all keys of a roster, after one confirmation; returns whether it was given."""
    from fedmq.wire.key_requests import acceptance_of, read_roster  # noqa: PLC0415
    from fedmq.wire.keys import accept_key, words  # noqa: PLC0415

    roster = read_roster(path, directory)
    known = [(request, acceptance_of(directory, path, request)) for request in roster.requests]
    width = max(len(request.name) for request, _ in known)
    print_line(f"{len(known)} keys, a roster made by {roster.signer}")
    for request, what in known:
        print_line(f"  {request.name:{width}}  {words(request.public_key)}  {what.value}")
    print_line(f"  words of the roster  {roster.words}")
    question = "  Does each of these processes belong to a site that reads out the same words of the roster?"
    if not (yes or not sys.stdin.isatty() or typer.confirm(question)):
        print_line("  not accepted")
        return False
    for request, _ in known:
        accept_key(directory, request.name, request.public_key)
    print_line("  accepted")
    return True


@keys_app.command("roster")
def keys_roster(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="The roster to be written.")],
    requests: Annotated[
        list[Path], typer.Argument(metavar="REQUEST...", show_default=False, help="Files made by fedmq keys new.")
    ],
    keys: _Keys = Path("keys"),
    name: Annotated[str, typer.Option("--name", help="Name of the private key that signs.")] = "coordinator",
) -> None:
    """Put the requests of all processes of a run into one signed file, which each site accepts as a whole.

    Send the file to all sites, where `fedmq keys accept` reads it. They compare the same twelve words, once. A site
    refuses a roster that lists another key for the site itself.

    Example: [bold]fedmq keys roster run.roster silo-00.request silo-01.request --keys keys[/bold]
    """
    from fedmq.wire.key_requests import make_roster  # noqa: PLC0415

    roster = make_roster(file, keys, name, requests)
    print_line(f"roster {file} of {len(roster.requests)} keys: send it to all sites")
    print_line(f"  words of the roster  {roster.words}")


@keys_app.command("remove")
def keys_remove(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Name of the accepted key.")],
    keys: _Keys = Path("keys"),
) -> None:
    """Stop accepting a key. A running coordinator expels its silo within a second.

    Example: [bold]fedmq keys remove silo-03 --keys keys[/bold]
    """
    from fedmq.wire.keys import revoke  # noqa: PLC0415

    revoke(keys, name)
    print_line(f"{name} is no longer accepted")


@keys_app.command("init")
def keys_init(
    directory: _Directory, silos: Annotated[int, typer.Option("--silos", min=1, max=1024, help="Number of silos.")]
) -> None:
    """Create and accept the keys of the coordinator, the evaluator and all silos, for simulations.

    The person who runs this command holds the private keys of all sites. Use `fedmq keys new` if the sites do not trust
    a single machine.

    Example: [bold]fedmq keys init keys --silos 4[/bold]
    """
    from fedmq.wire.keys import init_keys  # noqa: PLC0415
    from fedmq.wire.messages import COORDINATOR, EVALUATOR  # noqa: PLC0415

    width = max(2, len(str(silos - 1)))
    names = [COORDINATOR, EVALUATOR, *(f"silo-{index:0{width}d}" for index in range(silos))]
    init_keys(directory, names)
    print_line(f"{len(names)} keys in {directory}")
    print_line("this machine now holds every private key: use it for simulations, and `fedmq keys new` at real sites")


@keys_app.command("show")
def keys_show(directory: _Directory) -> None:
    """List the accepted keys: name, fingerprint, and its first 88 bits as words.

    Example: [bold]fedmq keys show keys[/bold]
    """
    from fedmq.wire.keys import fingerprint, load_accepted, words  # noqa: PLC0415

    accepted = load_accepted(directory)
    width = max(map(len, accepted), default=0)
    for name, key in accepted.items():  # no table, so that each key is one line for pipes and diffs
        print_line(f"{name:{width}}  {fingerprint(key)}  {words(key)}")


def _print_fingerprint(key: Ed25519PublicKey) -> None:
    from fedmq.wire.keys import fingerprint, words  # noqa: PLC0415

    print_line(f"  SHA256 {fingerprint(key)}")
    print_line(f"  words  {words(key)}")


_Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Folder of a released model, or of its run.", show_default=False)
]


def _folder(model: Path) -> Path:
    return model / "model" if (model / "model" / "config.json").is_file() else model


def sign_command(
    model: _Model,
    keys: Keys = Path("keys"),
    name: Annotated[str, typer.Option("--name", help="Name of the private key.")] = "coordinator",
) -> None:
    """Sign the folder of a released model with a private key, as signature.json in the folder.

    Example: [bold]fedmq sign runs/smoke --keys keys[/bold]
    """
    from fedmq.runs.release import sign_model  # noqa: PLC0415
    from fedmq.wire.keys import load_identity, words  # noqa: PLC0415

    identity = load_identity(keys, name)
    made = sign_model(_folder(model), identity)
    print_line(f"signed {len(made.files)} files of {_folder(model)} as {name}")
    print_line(f"words of the key: {words(identity)}")


def verify_command(
    model: _Model,
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="DIR", help="Folder of accepted keys that includes the signer's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify the signature of a released model's folder: show who signed it, and which files changed since.

    Without --keys the command prints the words of the key that signed; compare them with those of the signer. Exit code
    3 if the folder has changed since it was signed, or the key is not the accepted one.

    Example: [bold]fedmq verify model --keys keys[/bold]
    """
    from fedmq.runs.release import verify_model  # noqa: PLC0415
    from fedmq.wire.key_requests import known_keys  # noqa: PLC0415
    from fedmq.wire.keys import fingerprint, words  # noqa: PLC0415

    verified = verify_model(_folder(model))
    differences = list(verified.differences)
    if keys is not None:
        accepted = known_keys(keys).get(verified.signer)
        if accepted is None:
            raise InputError(
                str(keys), f"no accepted key of {verified.signer}", "the signer's key; see fedmq keys accept"
            )
        if accepted.public_bytes_raw() != verified.key.public_bytes_raw():
            differences.append(f"signed with another key than the accepted one of {verified.signer}")
    if as_json:
        facts = {"signer": verified.signer, "fingerprint": fingerprint(verified.key), "accepted": keys is not None}
        print_json({**facts, "files": verified.files, "differences": differences})
    else:
        for line in differences:
            print_line(line)
        if not differences:
            print_line(f"{verified.files} files are as {verified.signer} signed them")
        if keys is None:
            print_line(
                f"words of the key: {words(verified.key)}; compare them, or name a folder of accepted keys with --keys"
            )
    if differences:
        sys.exit(DIFFERENT)
