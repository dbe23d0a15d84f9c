"""Checks the box for problems every few minutes and sends changes (appliance.alerts)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from appliance.alerts import Known, Problem, Undelivered, channels, send, step
from appliance.config import AlertSettings
from appliance.controller.context.context import ControllerContext, SchedulerStatus
from appliance.controller.devices import cordons
from appliance.controller.interfaces.errors import OperationFailed
from appliance.store import box
from appliance.store.rows import JOBS, JobRow

LOOK_EVERY_S: Final = 300.0
RECENT_S: Final = 24 * 3600.0
TASK: Final = "alerts"
KNOWN: Final = "alerts"
"""Name of the known problems, by channel, among the facts about the box, so that a restart repeats no message."""
WARNINGS: Final = ("certificate", "keys", "memory available")
"""Checks of the doctor that are worth a message before they fail."""


async def look(context: ControllerContext, settings: AlertSettings) -> None:
    """Send problems that began or ended since the last check. Raises Undelivered, which `appliance status` shows;
    undelivered changes are sent again at the next check."""
    try:
        findings = (await context.doctor.look())["data"]
    except OperationFailed as error:
        findings = [{"check": "doctor", "state": "fail", "found": str(error), "remedy": "see logs/controller.log"}]
    held = {name: load.held for name, load in context.bus.load().models.items() if load.held}
    degraded = [*context.background.degraded(), *context.main_troubles()]
    status = context.scheduler.status()

    def send_changes() -> None:
        devices = cordons.in_view(context.db, status["devices"])
        failed = JOBS.list_all(context.db, "phase = 'failed' AND finished_s >= ?", time.time() - RECENT_S)
        problems = [*problems_of(findings, devices, status, held, degraded), *map(of_job, failed)]
        _send_changes(context, settings, {problem.id: problem for problem in problems}.values())

    await asyncio.to_thread(send_changes)


def _send_changes(context: ControllerContext, settings: AlertSettings, problems: Collection[Problem]) -> None:
    db, now_s = context.db, time.time()
    before: dict[str, Known] = box.get(db, KNOWN, {})
    after, faults = dict[str, Known](), []
    for channel in channels(settings):  # each channel has its own state: a failing one causes no repeats on the other
        earlier = before.get(channel, {})
        known, messages = step(problems, earlier, now_s, settings.repeat_s)
        for message in messages:
            try:
                send(settings, channel, message, context.box["public_url"])
            except Undelivered as error:
                faults.append(str(error))
                known.setdefault(message.id, earlier.get(message.id, {}))  # the problem's end is sent at the next check
            else:
                if message.id in known:
                    known[message.id]["sent_s"] = now_s
        after[channel] = known
    box.put(db, KNOWN, after)
    if faults:
        raise Undelivered(f"alerts were not delivered, {faults[0]}; `appliance doctor --send-test` tries it")


Rows = Iterable[Mapping[str, Any]]


def problems_of(
    findings: Rows, devices: Rows, status: SchedulerStatus, held: Mapping[str, int], degraded: Rows
) -> Iterator[Problem]:
    """Yield failed checks of the doctor, its warnings of devices and WARNINGS; devices lost or cordoned by the box, not
    those drained by a person; models with requests but no open engine, or whose engines do not start; failing tasks."""
    for finding in findings:
        check, state = finding["check"], finding["state"]
        if state == "fail" or (state == "warn" and check.startswith(("device ", *WARNINGS))):
            name = check.replace("device ", "device:") if check.startswith("device ") else f"check:{check}"
            yield Problem(name, f"{check}: {finding['found']}", finding["remedy"])
    for device in devices:
        if device["lost"] or device["cordon"] == "box":
            text = f"device {device['id']} is not used: {device['health_reason']}"
            remedy = f"docs/gpu.md has what to do; then `appliance gpu undrain {device['id']}`"
            yield Problem(f"device:{device['id']}", text, remedy)
    served = {replica["model"] for replica in status["replicas"] if replica["state"] == "open"}
    for model, count in held.items():
        if model not in served:
            text = f"{count} requests wait for {model}, which has no open engine"
            yield Problem(f"model:{model}", text, f"`appliance model show {model}` and `appliance mode show` say why")
    for trouble in status["troubles"]:
        model = trouble["model"]
        yield Problem(f"model:{model}", f"{model}: {trouble['message']}", f"`appliance model show {model}`")
    for task in degraded:
        if task["name"] != TASK:
            text = f"{task['name']} failed {task['failures']} times: {task['why']}"
            yield Problem(f"task:{task['name']}", text, "`appliance status`; the logs have the traceback")


def of_job(job: JobRow) -> Problem:
    reason = (job.error or {}).get("message", "no reason was recorded")
    remedy = f"`appliance job get {job.id}` and `appliance job logs {job.id}` have the details"
    return Problem(f"job:{job.id}", f"job {job.id} failed: {reason}", remedy, is_event=True)
