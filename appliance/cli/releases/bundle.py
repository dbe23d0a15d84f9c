"""`appliance bundle`; the work is done by `appliance.bundle.main` in a process of its own, never imported here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.command import OUTPUT, Format, examples, group
from appliance.cli.own_process import python

app = group("Bundles: a release in one signed file, for a machine without a network.")

FILE = Annotated[Path, typer.Argument(metavar="FILE", help="The bundle.")]
KEY = Annotated[
    str | None,
    typer.Option(
        "--key", help="The public key (or its file) that must have signed it. Default: the keys trusted here."
    ),
]


@app.command(
    epilog=examples(
        "appliance bundle keygen release.key",
        "",
        "release.key signs, and has no passphrase: keep it offline. release.key.pub is for everybody. Both are",
        "minisign's (`minisign -G -W` makes the same).",
    )
)
def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A new file for the secret key; FILE.pub gets the public one.")
    ],
    output_format: OUTPUT = "table",
) -> None:
    """Make the key with which bundles are signed."""
    in_process(output_format, "keygen", str(file))


@app.command(
    epilog=examples(
        "appliance bundle make appliance-0.2.0.run --key release.key",
        "appliance bundle make appliance-0.2.0.run --key release.key --version 0.2.0",
        "",
        "Call it in a checkout that `make setup` was called in. The packages come from where pip gets them.",
    )
)
def make(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")],
    key: Annotated[
        Path, typer.Option("--key", exists=True, dir_okay=False, readable=True, help="The secret key that signs.")
    ],
    build: Annotated[str | None, typer.Option("--build", help="Default: the one installed here.")] = None,
    version: Annotated[
        str | None, typer.Option("--version", help="The release's version. Default: pyproject.toml's.")
    ] = None,
    output_format: OUTPUT = "table",
) -> None:
    """Make a bundle of this checkout, for this machine's Python and build."""
    options = [*(["--build", build] if build else []), *(["--version", version] if version else [])]
    in_process(output_format, "make", str(file), "--key", str(key), *options)


@app.command(
    epilog=examples(
        "appliance bundle verify appliance-0.2.0.run",
        "appliance bundle verify appliance-0.2.0.run --key RWQ...",
        "sh appliance-0.2.0.run verify              where no appliance is installed",
        "",
        "Names what is changed, missing, extra or cut off, and whose signature it bears. Exit code 1: leave it alone.",
    )
)
def verify(file: FILE, key: KEY = None, output_format: OUTPUT = "table") -> None:
    """Read all of a bundle and check its signature."""
    in_process(output_format, "verify", str(file), *_key(key))


@app.command(
    epilog=examples(
        "appliance bundle install appliance-0.2.0.run /opt/appliance",
        "appliance bundle install appliance-0.3.0.run       alongside the release of this command",
        "sh appliance-0.2.0.run install /opt/appliance      where no appliance is installed",
        "",
        "A release is installed alongside those that are there; `appliance upgrade` makes it the current one.",
    )
)
def install(
    file: FILE,
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Default: where this release lies.")] = None,
    key: KEY = None,
    output_format: OUTPUT = "table",
) -> None:
    """Install a bundle's release, without a network."""
    in_process(output_format, "install", str(file), *([str(directory)] if directory else []), *_key(key))


@app.command(name="list", epilog=examples("appliance bundle list", "appliance bundle list -o json"))
def list_releases(output_format: OUTPUT = "table") -> None:
    """List the releases that are installed side by side."""
    in_process(output_format, "list")


@app.command(epilog=examples("appliance bundle remove 0.1.0"))
def remove(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="As `bundle list` shows it.")],
    output_format: OUTPUT = "table",
) -> None:
    """Remove a release that is neither the current one nor the one before it."""
    in_process(output_format, "remove", version)


def in_process(output_format: Format, *arguments: str) -> None:
    """It says what it does as it goes, and ends with an exit code of commands."""
    as_json = ["--json"] if output_format == "json" else []
    code = subprocess.run(python("appliance.bundle.main", *as_json, *arguments)).returncode
    if code != 0:
        raise typer.Exit(code if code in (1, 2) else 1)


def _key(key: str | None) -> list[str]:
    return [] if key is None else ["--key", key]
