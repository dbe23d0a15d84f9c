"""`appliance file`: upload and check training data, and save results. Checking a local file needs no box."""

from __future__ import annotations

import base64
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, BinaryIO

from appliance.cli import output
from appliance.cli.command import WORK_TIMEOUT_S, Session, command
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.locate import look_for_all
from appliance.cli.options import existing_file, flag, number, opt, picked
from appliance.cli.resources import segment
from train.methods.methods import METHODS

UPLOAD = opt("path FILE", type=existing_file)


def file_path(file_id: str) -> str:
    return f"/v1/files/{segment(file_id)}"


def uploaded_id(session: Session, option: str, argument: str) -> str:
    """Return the id of a file on the box; a local file is uploaded first. Raises BadUsage, CommandFailed."""
    path = Path(argument).expanduser()
    if path.is_file():
        sent = session.client.upload(path, "fine-tune")
        _refuse_bad(sent)
        output.say(f"{argument} is {sent['id']} on the box")
        return str(sent["id"])
    if argument.startswith("file-"):
        return argument
    raise BadUsage(f"{option} is {argument!r}; expected a file on this machine, or the id of an uploaded one (file-…)")


def _refuse_bad(answer: dict[str, Any]) -> None:
    """Raise CommandFailed with line numbers and reasons if the box found bad lines; print its other remarks."""
    details = answer.get("status_details") or ""
    if answer.get("status") == "error":
        details = details.replace("; line ", "\n  line ").replace(": line ", ":\n  line ", 1)
        raise CommandFailed(f"{answer['filename']} cannot be trained on ({answer['id']}):\n  {details}")
    if details:
        output.say(f"note: {answer['filename']}: {details}")


@command("file upload", UPLOAD, opt("--purpose PURPOSE", "As OpenAI names them.", default="fine-tune"))
def upload(session: Session, args: Namespace) -> None:
    """Send a file to the box, which checks training data line by line. Exit code 1 if lines are bad.

    A line of train.jsonl: {"messages": [{"role": "user", "content": "2+2?"},
                                         {"role": "assistant", "content": "4"}]}
    The alpaca and ShareGPT shapes are taken too and converted.

    Examples:
      appliance file upload train.jsonl -o json | jq -r .id
    """
    answer = session.client.upload(args.path, args.purpose)
    session.show(answer, lambda sent: output.view(sent | {"status_details": None}))
    _refuse_bad(answer)  # prints the details


@command(
    "file get",
    opt("id FILE_ID"),
    opt("--save PATH", "Write its content there; - is stdout."),
    flag("--errors", "Every bad line of training data, and why."),
)
def get(session: Session, args: Namespace) -> None:
    """Show a file of the box and its status, or save its content.

    Examples:
      appliance file get file-abc123 --errors
    """
    if args.errors and args.save is not None:
        raise BadUsage("give one of --errors and --save")
    path = file_path(args.id)
    if args.errors:
        session.show(session.client.get(f"{path}/errors"), _errors)
    elif args.save is None:
        session.show(session.client.get(path))
    elif args.save == "-":
        _download(session, session.client.get(path), sys.stdout.buffer)
        sys.stdout.buffer.flush()
    else:
        answer = session.client.get(path)
        try:
            with open(args.save, "wb") as out:
                saved_bytes = _download(session, answer, out)
        except OSError as error:
            raise BadUsage(f"cannot write {args.save}: {error.strerror}") from error
        session.show(answer, lambda _: f"{args.save}: {output.size(saved_bytes)}")


def _download(session: Session, file: dict[str, Any], out: BinaryIO) -> int:
    """Copy a file's content to `out`; return the number of bytes. A job's table, base64 in OpenAI's API, becomes
    CSV."""
    parts = session.client.parts(f"{file_path(file['id'])}/content")
    if file.get("purpose") != "fine-tune-results":
        return sum(map(out.write, parts))
    return out.write(base64.b64decode(b"".join(parts)))


def _errors(answer: dict[str, Any]) -> str:
    lines = [f"line {error['line']}: {error['reason']}" for error in answer["data"]]
    if answer["has_more"]:
        lines.append(f"and {answer['total'] - len(lines):,} more, of which the box keeps no reasons")
    return "\n".join(lines) or "no line is bad"


# Checks


@command(
    "file check",
    opt("target FILE|FILE_ID", "On this machine, or one that the box has."),
    opt("--model DIR|NAME", "Count tokens as this model does: a directory, or, for a file of the box, its model."),
    opt("--max-tokens N", "Longer examples are too long. Default: the model's context.", type=number(int, 1)),
    opt("--method NAME", f"What it is for: {', '.join(METHODS)}."),
    opt("--against FILE|FILE_ID", "The validation set, which training must not have seen."),
    without_box=lambda args: Path(args.target).expanduser().is_file() or not args.target.startswith("file-"),
)
def check(session: Session, args: Namespace) -> None:
    """Show what is in training data, in numbers and with examples by line. Changes nothing.

    Exit code 1 if a job would refuse the file.

    Examples:
      appliance file check train.jsonl --against valid.jsonl --model ./SmolLM2-135M-Instruct
      appliance file check file-abc123 --model smollm2-135m         on the box
      appliance file check train.jsonl -o json | jq -e '.checks.duplicates.share <= 0.01'      for scripts
    """
    options = picked(args, "model max_tokens method against")
    if session.client is None:
        report = _checked_here(Path(args.target).expanduser(), options)
    else:
        with output.progress(f"the box reads {args.target}"):
            path = f"{file_path(args.target)}/check"
            report = session.client.send("POST", path, body=options, timeout_s=WORK_TIMEOUT_S)
    session.show(report, _report)
    if not report["usable"]:
        raise CommandFailed(f"a job would refuse the file{'' if report['examples'] else ': it has no examples'}")


def _checked_here(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Check a file on this machine and return the report. Raises CliError."""
    look_for_all()
    from train.data_checks.process import report_on
    from train.plan.errors import TrainError

    names = {name: str(Path(options[name]).expanduser()) for name in ("model", "against") if name in options}
    try:
        with output.progress(f"reading {path}"):
            return report_on(path, str(path), **(options | names))
    except TrainError as error:
        raise BadUsage(str(error)) from error
    except ValueError as error:
        raise CommandFailed(str(error)) from error


def _report(report: dict[str, Any]) -> Any:
    checks = report["checks"]
    rows = [{"check": name, **result, "first": None} for name, result in checks.items()]
    first = [{"check": name, **example} for name, result in checks.items() for example in result["first"][:3]]
    return output.stack(
        output.view({name: value for name, value in report.items() if name != "checks"}),
        output.listing("check >examples=count >share ?kinds", rows),
        output.listing("", first) if first else None,
    )
