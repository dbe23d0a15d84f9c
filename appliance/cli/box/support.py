"""`appliance support bundle`; what packs it is in `appliance.support`, run in a process of its own."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.box.local import CONFIG, resolved
from appliance.cli.command import DATA_DIR, OUTPUT, examples, group
from appliance.cli.errors import BadUsage, CliError, CommandFailed
from appliance.cli.locate import BoxFile
from appliance.cli.own_process import said_by

if TYPE_CHECKING:
    from appliance.cli.client import Client

app = group("Collect what somebody else needs to see what is wrong with a box.")
# Name in the bundle -> what the box is asked for it.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "status.json": ("/admin/v1/status", {}),
    "devices.json": ("/admin/v1/devices", {}),
    "handovers.json": ("/admin/v1/handovers", {"limit": 50}),
    "models.json": ("/admin/v1/models", {"limit": 500}),
    "jobs.json": ("/v1/fine_tuning/jobs", {"limit": 50}),
    "audit.json": ("/admin/v1/audit", {"limit": 200}),
}


@app.callback()
def support() -> None:
    """Collect what somebody else needs to see what is wrong with a box."""


@app.command(
    epilog=examples(
        "appliance support bundle                       logs of a day, configuration, versions, the doctor's findings",
        "appliance support bundle --hours 2 --to box.tar.gz",
        "tar -tzf box.tar.gz; tar -xzOf box.tar.gz appliance-support/manifest.json",
        "",
        "The box may run or not. Nothing is sent. Secrets, addresses, mails, homes and names of people and keys are",
        "replaced, by patterns, which miss things: look before you send it. Prompts, answers, data and weights are not",
        "in it.",
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
    if target.exists():
        raise BadUsage(f"--to is {str(target)!r}, which exists; expected a new file")
    if not target.absolute().parent.is_dir():
        raise BadUsage(f"--to is {str(target)!r}; there is no folder {str(target.absolute().parent)!r}")
    box_file = BoxFile.read(settings.box.data_dir)
    answers = _answers(box_file)
    options = ["--config-json", settings.model_dump_json(), "--output", str(target.absolute()), "--hours", str(hours)]
    options += ["--runs"] if box_file.pid is not None else []
    try:
        with output.progress("packing"):
            manifest = json.loads(said_by("appliance.support.main", *options, given=json.dumps(answers)))
    except CommandFailed:
        target.unlink(missing_ok=True)
        raise
    if output_format == "json":
        output.print_json({"file": str(target), **manifest})
    else:
        output.draw(_packed(target, manifest))


def _answers(box_file: BoxFile) -> dict[str, Any]:
    parts: dict[str, str] = {}
    missing: dict[str, str] = {}
    names: list[str] = []
    if box_file.pid is None:
        return {"parts": {}, "missing": dict.fromkeys((*ASKED, "metrics.txt"), "the box does not run"), "names": []}
    # Fenced, as in `command`: HTTP would add to the time of `--help`.
    from appliance.cli.client import Address, Client

    client = Client(Address(socket_path=box_file.controller_socket()))
    for name, (path, query) in ASKED.items():
        try:
            parts[name] = json.dumps(without_graders(client.get(path, **query)), indent=1)
        except CliError as error:
            missing[name] = str(error)
    try:
        parts["metrics.txt"] = _metrics(client)
        names = _names(client)
    except CliError as error:
        missing["metrics.txt"] = str(error)
    return {"parts": parts, "missing": missing, "names": names}


def without_graders(answer: Any) -> Any:
    """What the box answered, where of the graders of jobs the kind alone is left: in them stand the prompts of judges,
    code, and what answers are held against."""
    jobs = answer.get("data") if isinstance(answer, dict) else None
    for job in jobs if isinstance(jobs, list) else ():
        method = job.get("method") if isinstance(job, dict) else None
        for block in method.values() if isinstance(method, dict) else ():
            if isinstance(block, dict) and isinstance(grader := block.get("grader"), dict):
                block["grader"] = {"type": grader.get("type")}
    return answer


def _metrics(client: Client) -> str:
    text = io.BytesIO()
    client.download("/admin/v1/metrics", text)
    return text.getvalue().decode(errors="replace")


def _names(client: Client) -> list[str]:
    keys = client.listed("/admin/v1/keys")["data"]
    return sorted({name for key in keys for name in (key.get("name"), key.get("owner")) if name})


def _packed(target: Path, manifest: dict[str, Any]) -> Any:
    rows = [(one["name"], formats.size(one["bytes"]), one["source"]) for one in manifest["files"]]
    replaced = ", ".join(f"{count} x {kind}" for kind, count in manifest["replaced"].items()) or "nothing"
    left_out = "\n".join(f"left out: {one['name']}: {one['why']}" for one in manifest["missing"])
    return output.stack(
        output.table(("FILE", ">BYTES", "FROM"), rows, empty="nothing"),
        left_out or None,
        f"replaced: {replaced}",
        f"{target} ({formats.size(target.stat().st_size)}): look at it before you send it, `tar -xzf {target}`",
    )
