"""Looks for problems of the box every few minutes and sends what changed (appliance.alerts)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from appliance.alerts import Known, Problem, Undelivered, channels, send, step
from appliance.config import AlertSettings
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.scheduler import SchedulerStatus
from appliance.controller.devices import cordons
from appliance.controller.interfaces.errors import OperationFailed
from appliance.store.objects import jobs
from appliance.store.records import box
from appliance.store.rows import JobRow

LOOK_EVERY_S: Final = 300.0
RECENT_S: Final = 24 * 3600.0
TASK: Final = "alerts"
KNOWN: Final = "alerts"
"""Name of the known problems, by channel, among the facts about the box, so that a restart repeats no message."""
WARNINGS: Final = ("certificate", "keys", "memory available")
"""Checks of the doctor that are worth a message before they fail."""


class Alerts:
    def __init__(self, context: ControllerContext, settings: AlertSettings) -> None:
        self._context, self._settings = context, settings
        self._box = context.box["public_url"]

    async def look(self) -> None:
        """Send what changed since the last look. Raises Undelivered, which shows in `appliance status`; what was not
        delivered is sent again at the next look."""
        try:
            findings = (await self._context.doctor.look())["data"]
        except OperationFailed as error:
            findings = [{"check": "doctor", "state": "fail", "found": str(error), "remedy": "see logs/controller.log"}]
        held = {name: load.held for name, load in self._context.bus.load().models.items() if load.held}
        degraded = [*self._context.background.degraded(), *self._context.main_troubles()]
        status = self._context.scheduler.status()
        await asyncio.to_thread(self._send_changes, findings, held, degraded, status)

    def _send_changes(
        self,
        findings: Sequence[Mapping[str, Any]],
        held: Mapping[str, int],
        degraded: Sequence[Mapping[str, Any]],
        status: SchedulerStatus,
    ) -> None:
        db, now_s = self._context.db, time.time()
        problems = (
            *of_findings(findings),
            *of_devices(cordons.in_view(db, status["devices"])),
            *of_models(status["troubles"], held, status["replicas"]),
            *of_tasks(degraded),
            *of_jobs(jobs.list_in_phase(db, "failed"), now_s - RECENT_S),
        )
        current = {problem.id: problem for problem in problems}.values()
        before: dict[str, Known] = box.get(db, KNOWN, {})
        after, faults = dict[str, Known](), []
        for channel in channels(self._settings):  # each with its own state: one that fails repeats nothing on the other
            earlier = before.get(channel, {})
            known, messages = step(current, earlier, now_s, self._settings.repeat_s)
            for message in messages:
                try:
                    send(self._settings, channel, message, self._box)
                except Undelivered as error:
                    faults.append(str(error))
                    known.setdefault(message.id, earlier.get(message.id, {}))  # an end is sent at the next look
                else:
                    if message.id in known:
                        known[message.id]["sent_s"] = now_s
            after[channel] = known
        box.put(db, KNOWN, after)
        if faults:
            raise Undelivered(f"alerts were not delivered, {faults[0]}; `appliance doctor --send-test` tries it")


def of_findings(findings: Iterable[Mapping[str, Any]]) -> Iterator[Problem]:
    """What fails of the doctor's checks, and the warnings that somebody should read."""
    for one in findings:
        check, state = one["check"], one["state"]
        if state == "fail" or (state == "warn" and check.startswith(("device ", *WARNINGS))):
            name = check.replace("device ", "device:") if check.startswith("device ") else f"check:{check}"
            yield Problem(name, f"{check}: {one['found']}", one["remedy"])


def of_devices(devices: Iterable[Mapping[str, Any]]) -> Iterator[Problem]:
    """Devices that are lost, or that the box does not trust; not those that a person drained."""
    for device in devices:
        if device["lost"] or device["cordon"] == "box":
            text = f"device {device['id']} is not used: {device['health_reason']}"
            remedy = f"docs/gpu.md has what to do; then `appliance gpu undrain {device['id']}`"
            yield Problem(f"device:{device['id']}", text, remedy)


def of_models(
    troubles: Iterable[Mapping[str, Any]], held: Mapping[str, int], replicas: Iterable[Mapping[str, Any]]
) -> Iterator[Problem]:
    """Models whose engines do not start, and models that people ask while no engine of theirs is open."""
    served = {replica["model"] for replica in replicas if replica["state"] == "open"}
    for model, count in held.items():
        if model not in served:
            text = f"{count} requests wait for {model}, which has no open engine"
            yield Problem(f"model:{model}", text, f"`appliance model show {model}` and `appliance mode show` say why")
    for trouble in troubles:
        model = trouble["model"]
        yield Problem(f"model:{model}", f"{model}: {trouble['message']}", f"`appliance model show {model}`")


def of_tasks(degraded: Iterable[Mapping[str, Any]]) -> Iterator[Problem]:
    for task in degraded:
        if task["name"] != TASK:
            text = f"{task['name']} failed {task['failures']} times: {task['why']}"
            yield Problem(f"task:{task['name']}", text, "`appliance status`; the logs have the traceback")


def of_jobs(failed: Iterable[JobRow], since_s: float) -> Iterator[Problem]:
    for job in failed:
        if (job.finished_s or 0.0) >= since_s:
            reason = (job.error or {}).get("message", "no reason was recorded")
            remedy = f"`appliance job get {job.id}` and `appliance job logs {job.id}` have the details"
            yield Problem(f"job:{job.id}", f"job {job.id} failed: {reason}", remedy, is_event=True)
