"""`appliance file`: training data in, results out."""

from __future__ import annotations

import base64
import binascii
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import Session, box_command, group
from appliance.cli.errors import BadUsage, CliError, CommandFailed, Unreachable, WaitTimedOut
from appliance.cli.jobs import file_data

_ERRORS_ROUTE = re.compile(r"GET /v1/files/(\S+)/errors")

app = group("Files: training and validation data, and what jobs leave behind.")
app.registered_commands += file_data.app.registered_commands


@box_command(
    app,
    "appliance file upload train.jsonl",
    "appliance file upload train.jsonl -o json | jq -r .id",
    "",
    'A line of train.jsonl: {"messages": [{"role": "user", "content": "2+2?"},',
    '                                     {"role": "assistant", "content": "4"}]}',
    "The alpaca and ShareGPT shapes are taken too and converted.",
)
def upload(
    session: Session,
    path: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, readable=True)],
    purpose: Annotated[str, typer.Option("--purpose", help="As OpenAI names them.")] = "fine-tune",
) -> None:
    """Send a file to the box, which checks training data line by line. Exit code 1 if lines are bad."""
    answer = send(session, path, purpose)
    session.show(answer, lambda sent: _fields(sent | {"status_details": None}))
    refuse_bad(answer)  # says the details


@box_command(app, "appliance file list", "appliance file list --purpose fine-tune-results", name="list")
def list_files(
    session: Session,
    purpose: Annotated[str | None, typer.Option("--purpose", help="Only files of this purpose.")] = None,
) -> None:
    """List files, the newest first."""
    session.show(session.client.listed("/v1/files", purpose=purpose), _table)


@box_command(
    app,
    "appliance file get file-abc123",
    "appliance file get file-abc123 --save metrics.csv",
    "appliance file get file-abc123 --save - | head",
    "appliance file get file-abc123 --errors",
    "appliance file get file-abc123 --report            what the box found in it",
    "appliance file get file-abc123 --lineage           what a prepared file was made of",
)
def get(
    session: Session,
    file_id: Annotated[str, typer.Argument(metavar="FILE_ID")],
    save: Annotated[
        str | None, typer.Option("--save", metavar="PATH", help="Write its content there; - is stdout.")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Every bad line of training data, and why.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Duplicates, personal data …: as `file check`.")] = False,
    lineage: Annotated[bool, typer.Option("--lineage", help="Show what it was made of, if it was prepared.")] = False,
) -> None:
    """Show what the box knows of a file, or save its content."""
    if errors + report + lineage + (save is not None) > 1:
        raise BadUsage("give one of --errors, --report, --lineage and --save")
    for wanted, part, drawn in (
        (errors, "errors", _errors),
        (report, "check", file_data.drawn),
        (lineage, "lineage", file_data.made),
    ):
        if wanted:
            session.show(session.client.get(f"{paths.file(file_id)}/{part}"), drawn)
            return
    answer = session.client.get(paths.file(file_id))
    if save is None:
        session.show(answer, _fields)
        return
    if save == "-":
        _download(session, answer | {"id": file_id}, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    try:
        with open(save, "wb") as out:
            saved_bytes = _download(session, answer | {"id": file_id}, out)
    except OSError as error:
        raise BadUsage(f"cannot write {save}: {error.strerror}") from error
    session.show(answer, lambda _: f"{save}: {formats.size(saved_bytes)}")


def _download(session: Session, file: dict[str, Any], out: BinaryIO) -> int:
    """Copies a file's content to `out`; returns how many bytes. A job's table becomes CSV again: boxes keep it in
    base64, as OpenAI does, and those of older releases as it is."""
    where = f"{paths.file(file['id'])}/content"
    if file.get("purpose") != "fine-tune-results":
        return session.client.download(where, out)
    table = io.BytesIO()
    session.client.download(where, table)
    with suppress(binascii.Error):
        return out.write(base64.b64decode(table.getvalue(), validate=True))
    return out.write(table.getvalue())


@box_command(app, "appliance file rm file-abc123", "appliance file rm file-abc123 file-def456")
def rm(session: Session, file_ids: Annotated[list[str], typer.Argument(metavar="FILE_ID...")]) -> None:
    """Delete files. Jobs that were made from them keep their own copy."""
    answers = [session.client.delete(paths.file(file_id)) for file_id in file_ids]
    session.show({"data": answers}, lambda done: "\n".join(f"deleted {gone['id']}" for gone in done["data"]))


def send(session: Session, path: Path, purpose: str) -> dict[str, Any]:
    """Upload with a progress line; the file object. Raises CliError."""
    with output.progress(f"uploading {path.name}") as meter:
        total, sent = path.stat().st_size, 0

        def on_bytes(piece: int) -> None:
            nonlocal sent
            sent += piece
            message = f"uploading {path.name}" if sent < total else f"the box checks {path.name}"
            meter.update(message, done=sent, total=total)

        return session.client.upload(path, purpose, on_bytes)


@contextmanager
def kept_if_taken(session: Session, path_of: Callable[[str], str] = paths.file) -> Iterator[list[str]]:
    """Collects ids of what a command makes for one request; deletes it when the box refuses the request, as nobody
    asked for it alone."""
    made: list[str] = []
    try:
        yield made
    except (Unreachable, WaitTimedOut):  # the request may have been taken
        raise
    except CliError:
        for one in made:
            with suppress(CliError):  # the first error is the one to tell
                session.client.delete(path_of(one))
        raise


def refuse_bad(answer: dict[str, Any]) -> None:
    """Raises CommandFailed with line numbers and reasons when the box found bad lines; says what else it noticed."""
    details = answer.get("status_details")
    if answer.get("status") == "error":
        reasons = _details(answer).replace("\n", "\n  ") if details else "no reason given"
        raise CommandFailed(f"{answer['filename']} cannot be trained on ({answer['id']}):\n  {reasons}")
    if details:
        output.say(f"note: {answer['filename']}: {details}")


def _fields(answer: dict[str, Any]) -> Any:
    return output.fields(
        ("id", answer["id"]),
        ("filename", answer["filename"]),
        ("purpose", answer["purpose"]),
        ("bytes", f"{answer['bytes']:,}"),
        ("created", formats.moment(answer["created_at"])),
        ("status", answer["status"]),
        *(((_about(answer), _details(answer)),) if answer.get("status_details") else ()),
        *((("data check", _checked(answer["check"])),) if answer.get("check") else ()),
    )


def _checked(check: dict[str, Any]) -> str:
    found = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in check.get("found", {}).items())
    return found or ("nothing found" if check["status"] == "done" else check["status"])


def _about(answer: dict[str, Any]) -> str:
    return "why" if answer["status"] == "error" else "note"


def _details(answer: dict[str, Any]) -> str:
    text = _ERRORS_ROUTE.sub(r"`appliance file get \1 --errors`", answer["status_details"])
    return text.replace("; line ", "\nline ").replace(": line ", ":\nline ", 1)


def _errors(answer: dict[str, Any]) -> str:
    lines = [f"line {error['line']}: {error['reason']}" for error in answer["data"]]
    if answer["has_more"]:
        lines.append(f"and {answer['total'] - len(lines):,} more, of which the box keeps no reasons")
    return "\n".join(lines) or "no line is bad"


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("ID", "PURPOSE", ">BYTES", "STATUS", "CREATED", "FILENAME"),
        (
            (f["id"], f["purpose"], f"{f['bytes']:,}", f["status"], formats.moment(f["created_at"]), f["filename"])
            for f in answer["data"]
        ),
        empty="no files; `appliance file upload FILE` sends one",
    )
