"""`appliance batch`: many inference requests from a file, answered by engines that are otherwise idle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import Session, box_command, group
from appliance.cli.errors import CommandFailed
from appliance.cli.jobs.file import kept_if_taken, send
from appliance.cli.operations import TIMEOUT, Patience

app = group("Batches: many requests from a file, answered while engines are idle.")
FINISHED = frozenset({"completed", "failed", "expired", "cancelled"})
BATCH = Annotated[str, typer.Argument(metavar="BATCH_ID")]
_ERRORS_SHOWN = 20


@box_command(
    app,
    "appliance batch create requests.jsonl",
    "appliance batch create requests.jsonl --wait && appliance batch list",
    "appliance batch create requests.jsonl --endpoint /v1/embeddings",
    "",
    'A line of requests.jsonl: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",',
    '                           "body": {"model": "starter", "messages": [{"role": "user", "content": "Hi"}]}}',
)
def create(
    session: Session,
    path: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, readable=True)],
    endpoint: Annotated[str, typer.Option("--endpoint", help="What the lines ask.")] = "/v1/chat/completions",
    wait: Annotated[bool, typer.Option("--wait", help="Return when it has ended; exit code 1 if it failed.")] = False,
    timeout: TIMEOUT = None,
) -> None:
    """Upload FILE and start a batch of its lines, which is done within 24 hours or expires."""
    with kept_if_taken(session) as uploaded:
        uploaded.append(send(session, path, "batch")["id"])
        made = session.client.post(
            "/v1/batches", {"input_file_id": uploaded[0], "endpoint": endpoint, "completion_window": "24h"}
        )
    if wait:
        made = wait_for_end(session, made, timeout)
    session.show(made, _fields)
    if wait:
        _refuse_bad(made)


@box_command(app, "appliance batch list", "appliance batch list -o json | jq -r .data[0].id", name="list")
def list_batches(session: Session) -> None:
    """List batches, the newest first."""
    session.show(session.client.get("/v1/batches", limit=100), _table)


@box_command(app, "appliance batch show batch_abc123")
def show(session: Session, batch_id: BATCH) -> None:
    """Show how far a batch is, what it waits for, and its files."""
    session.show(session.client.get(paths.batch(batch_id)), _fields)


@box_command(app, "appliance batch cancel batch_abc123")
def cancel(session: Session, batch_id: BATCH) -> None:
    """Cancel a batch. Its output file keeps the answers so far."""
    session.show(session.client.post(f"{paths.batch(batch_id)}/cancel"), _fields)


def wait_for_end(session: Session, batch: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
    """The batch once it has ended. Raises WaitTimedOut."""
    patience = Patience(timeout_s)
    with output.progress(batch["id"]) as meter:
        while batch["status"] not in FINISHED:
            patience.pause(f"{batch['id']} is {batch['status']} after {patience.limit}; it goes on")
            batch = patience.get(session, paths.batch(batch["id"])) or batch
            counts = batch["request_counts"]
            waits = f", waits: {batch['waiting_for']}" if batch.get("waiting_for") else ""
            done = counts["completed"] + counts["failed"]
            meter.update(f"{batch['id']} {batch['status']}{waits}", done=done, total=counts["total"] or None)
    return batch


def _refuse_bad(batch: dict[str, Any]) -> None:
    """Raises CommandFailed unless every line was answered without an error. What was shown has the other reasons."""
    errors = (batch.get("errors") or {}).get("data") or []
    if batch["status"] != "completed":
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        reason = f": {_reason(errors[0])}{more}" if errors else ""
        ended = "failed" if batch["status"] == "failed" else f"is {batch['status']}"
        raise CommandFailed(f"{batch['id']} {ended}{reason}")
    if batch["request_counts"]["failed"]:
        failed, file_id = batch["request_counts"]["failed"], batch["error_file_id"]
        raise CommandFailed(f"{failed} lines failed; `appliance file get {file_id} --save -` shows why")


def _reason(error: dict[str, Any]) -> str:
    return f"line {error['line']}: {error['message']}" if error.get("line") else error["message"]


def _fields(batch: dict[str, Any]) -> Any:
    errors = (batch.get("errors") or {}).get("data") or []
    return output.fields(
        ("id", batch["id"]),
        ("status", batch["status"]),
        ("requests", _counts(batch)),
        ("waits for", formats.or_dash(batch.get("waiting_for"))),
        ("model", formats.or_dash(batch.get("model"))),
        ("endpoint", batch["endpoint"]),
        ("created", formats.moment(batch["created_at"])),
        ("expires", formats.moment(batch["expires_at"])),
        ("input file", batch["input_file_id"]),
        ("output file", formats.or_dash(batch["output_file_id"])),
        ("error file", formats.or_dash(batch["error_file_id"])),
        *(("error", _reason(error)) for error in errors[:_ERRORS_SHOWN]),
        *([("errors", f"{len(errors) - _ERRORS_SHOWN} more; -o json has them")] if errors[_ERRORS_SHOWN:] else []),
    )


def _counts(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    return f"{counts['completed']} answered, {counts['failed']} failed of {counts['total']}"


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("ID", "STATUS", ">ANSWERED", ">FAILED", ">TOTAL", "CREATED", "WAITS FOR"),
        (
            (
                b["id"],
                b["status"],
                *(str(b["request_counts"][name]) for name in ("completed", "failed", "total")),
                formats.moment(b["created_at"]),
                formats.or_dash(b.get("waiting_for")),
            )
            for b in answer["data"]
        ),
        empty="no batches; `appliance batch create FILE` starts one",
    )
