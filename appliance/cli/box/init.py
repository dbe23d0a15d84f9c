"""`appliance init`: writes a commented configuration to begin from, one of `appliance/templates`."""

from __future__ import annotations

import contextlib
import os
import shlex
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer

from appliance.cli import output
from appliance.cli.command import DATA_DIR, OUTPUT, examples, group
from appliance.cli.errors import CommandFailed, Conflict
from appliance.cli.locate import BoxFile, data_dir_option

app = group("Write a configuration to begin from.")
Template = Literal["light", "box", "enterprise"]


@app.command(
    epilog=examples(
        "appliance init --template light                 4 devices, one team",
        "appliance init --template box                   8 devices, several teams",
        "appliance init --template enterprise            4 machines with 8 devices each",
        "appliance init --template box /etc/box/appliance.toml && appliance up --config /etc/box/appliance.toml",
        "",
        "Every line has its reason next to it; finance, manufacturing and education are examples at the end.",
        "Without FILE it is appliance.toml in the data directory (default: ~/.local/share/appliance), which",
        "`appliance up` reads by itself.",
    )
)
def init(
    template: Annotated[Template, typer.Option("--template", help="4 devices, 8, or 32 on four machines.")],
    file: Annotated[str | None, typer.Argument(metavar="[FILE]", help="A new file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Write a configuration to begin from."""
    text = (resources.files("appliance") / "templates" / f"{template}.toml").read_text()
    home = BoxFile.read(data_dir).data_dir
    path = home / "appliance.toml" if file is None else Path(file).expanduser().resolve()
    if file is None and data_dir is None:
        output.say(f"note: no FILE and no --data-dir: it goes to the default data directory, {home}")
    try:
        if file is None:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path, text, force)
    except FileExistsError as error:
        raise Conflict(f"{path} is there already; --force replaces it") from error
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error
    if output_format == "json":
        output.print_json({"file": str(path), "template": template})
        return
    named = data_dir_option(home) if file is None else f" --config {shlex.quote(str(path))}"
    output.say(f"{path} is written: read it, change what is yours, then `appliance up{named}`")


def _write(path: Path, text: str, force: bool) -> None:
    """The whole file or none of it. Raises FileExistsError unless forced, OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            written.write(text)
            written.flush()
            os.fsync(written.fileno())
        if force:
            os.replace(partial, path)
        else:
            os.link(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
