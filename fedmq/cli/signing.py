"""``fedmq sign`` and ``fedmq verify``: signatures of released models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedmq.cli.console import DIFFERENT, out
from fedmq.cli.options import AsJson, Keys
from fedmq.errors import InputError
from fedmq.text import print_json, printable

_Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Folder of a released model, or of its run.", show_default=False)
]


def add_signing(app: typer.Typer) -> None:
    """Add the two commands."""
    app.command("sign")(sign_command)
    app.command("verify")(verify_command)


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
    _print(f"signed {len(made.files)} files of {_folder(model)} as {name}")
    _print(f"words of the key: {words(identity)}")


def verify_command(
    model: _Model,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="DIR", help="Folder of accepted keys that includes the signer's."),
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

    found = verify_model(_folder(model))
    differences = list(found.differences)
    if keys is not None:
        accepted = known_keys(keys).get(found.signer)
        if accepted is None:
            raise InputError(str(keys), f"no accepted key of {found.signer}", "the signer's key; see fedmq keys accept")
        if accepted.public_bytes_raw() != found.key.public_bytes_raw():
            differences.append(f"signed with another key than the accepted one of {found.signer}")
    if as_json:
        facts = {"signer": found.signer, "fingerprint": fingerprint(found.key), "accepted": keys is not None}
        print_json({**facts, "files": found.files, "differences": differences})
    else:
        for line in differences:
            _print(line)
        if not differences:
            _print(f"{found.files} files are as {found.signer} signed them")
        if keys is None:
            _print(f"words of the key: {words(found.key)}; compare them, or name a folder of accepted keys with --keys")
    if differences:
        sys.exit(DIFFERENT)


def _print(line: str) -> None:
    out.print(printable(line), highlight=False, markup=False, soft_wrap=True)
