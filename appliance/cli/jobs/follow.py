"""Following a job: its events and metrics as they come, until it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from appliance.cli import formats, output, paths
from appliance.cli.command import Session
from appliance.cli.errors import CommandFailed
from appliance.cli.operations import LOOK_EVERY_S, Patience

# By name in an event: how a line calls it, and its form.
_MEASURED = (
    ("train_loss", "loss", ".4f"),
    ("valid_loss", "validation loss", ".4f"),
    ("train_mean_token_accuracy", "accuracy", ".1%"),
    ("valid_mean_token_accuracy", "validation accuracy", ".1%"),
    ("train_mean_reward", "reward", ".4f"),
    ("valid_mean_reward", "validation reward", ".4f"),
    ("reverse_kl", "reverse KL", ".4f"),
    ("answer_reverse_kl", "of an answer", ".2f"),
    ("valid_answer_reverse_kl", "of an answer", ".2f"),
    ("entropy", "entropy", ".3f"),
    ("valid_entropy", "validation entropy", ".3f"),
    ("equal_rewards", "prompts with equal rewards", ".0%"),
    ("mean_unresponsive_rewards", "not graded", ".0%"),
    ("teacher_errors", "not taught", ".0%"),
    ("completion_tokens_mean", "tokens an answer", ".0f"),
)
FINISHED = frozenset({"succeeded", "failed", "cancelled"})
_PAGE = 200


def print_logs(session: Session, job_id: str, follow: bool) -> None:
    """Print every event so far and, if `follow`, those to come. Raises CommandFailed if the followed job ended
    badly."""
    patience, last_id = Patience(), None
    while True:
        # Read the job before its events: if it has ended by then, its last event is among them.
        job = patience.get(session, paths.job(job_id)) if follow else session.client.get(paths.job(job_id))
        if job is not None:
            events = list(_events_after(session, job_id, last_id))
            for event in events:
                # The time to finish is known as of now, so it belongs to the newest line only.
                _print_event(session, event, job if event is events[-1] else None)
                last_id = event["id"]
            if not follow:
                return
            if job["status"] in FINISHED:
                break
        time.sleep(LOOK_EVERY_S)
    end_well(job)


def wait_for_end(session: Session, job_id: str, timeout_s: float | None) -> dict[str, Any]:
    """The job once it has ended. Raises WaitTimedOut."""
    patience = Patience(timeout_s)
    with output.progress(job_id) as meter:
        while True:
            job = patience.get(session, paths.job(job_id))
            if job is not None:
                if job["status"] in FINISHED:
                    return job
                _update(session, meter, job, patience)
            patience.pause(f"{job_id} is {job['status'] if job else 'unknown'} after {patience.limit}; it goes on")


def end_well(job: dict[str, Any]) -> None:
    """Says how a finished job ended. Raises CommandFailed unless it succeeded."""
    if job["status"] == "succeeded":
        output.say(f"{job['id']} succeeded: {job['fine_tuned_model']}")
        if job.get("verdict"):
            output.say(job["verdict"]["text"])
        return
    error = job.get("error") or {}
    reason = f": {error['message']}" if error.get("message") else ""
    raise CommandFailed(f"{job['id']} {'was cancelled' if job['status'] == 'cancelled' else 'failed'}{reason}")


def event_line(event: dict[str, Any], job: dict[str, Any] | None) -> str:
    """One event for a person. `job` gives the time to finish, while it runs; None: do not show it."""
    data = event.get("data") or {}
    at = formats.clock(event["created_at"])
    if event["type"] != "metrics":
        mark = "" if event["level"] == "info" else f"{event['level']}: "
        return f"{at}  {mark}{event['message']}"
    parts = [f"step {data.get('step')}/{formats.or_dash(data.get('total_steps'))}"]
    parts += [f"{label} {data[name]:{form}}" for name, label, form in _MEASURED if data.get(name) is not None]
    own = {name: value for name, value in data.items() if "/" in name and isinstance(value, (int, float))}
    parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in own.items()]  # of the training method
    if data.get("grad_norm") is not None:
        parts.append(f"grad norm {data['grad_norm']:.3g}")
    if data.get("learning_rate") is not None:
        parts.append(f"lr {data['learning_rate']:.2e}")
    if data.get("tokens_per_s") is not None:
        parts.append(f"{data['tokens_per_s']:,.0f} tokens/s")
    if data.get("devices") is not None:
        parts.append(f"{data['devices']} device{'s' if data['devices'] != 1 else ''}")
    left_s = _seconds_left(job) if job else None
    if left_s is not None:
        parts.append(f"ETA {formats.duration(left_s)}")
    return f"{at}  {'  '.join(parts)}"


def _events_after(session: Session, job_id: str, last_id: str | None) -> Iterator[dict[str, Any]]:
    """Events that came after `last_id`, the oldest first. The API lists the newest first."""
    newer: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = session.client.get(f"{paths.job(job_id)}/events", limit=_PAGE, after=cursor)
        for event in page["data"]:
            if event["id"] == last_id:
                return reversed(newer)
            newer.append(event)
        if not page["has_more"] or not page["data"]:
            return reversed(newer)
        cursor = page["data"][-1]["id"]


def _print_event(session: Session, event: dict[str, Any], job: dict[str, Any] | None) -> None:
    text = output.json_text(event) if session.as_json else formats.printable(event_line(event, job))
    print(text, flush=True)


def _seconds_left(job: dict[str, Any]) -> float | None:
    """Seconds to the estimated finish; None if unknown, or less than one."""
    finish = job.get("estimated_finish")
    if finish is None or job["status"] in FINISHED:
        return None
    left_s = finish - time.time()
    return left_s if left_s >= 1 else None


def _update(session: Session, meter: output.Meter, job: dict[str, Any], patience: Patience) -> None:
    page = patience.get(session, f"{paths.job(job['id'])}/events", limit=5)
    data = next((e["data"] for e in (page or {}).get("data", ()) if e["type"] == "metrics" and e.get("data")), {})
    left_s = _seconds_left(job)
    eta = "" if left_s is None else f", ETA {formats.duration(left_s)}"
    meter.update(f"{job['id']} {job['status']}{eta}", done=data.get("step"), total=data.get("total_steps"))
