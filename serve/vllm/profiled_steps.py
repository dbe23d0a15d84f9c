"""Profiles the steps of one engine worker on demand. vLLM's own profiler has to be asked for when the engine starts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from runtime.profile_shares import MOST_EVENTS, shares


class ProfiledSteps:
    """Profiles from its creation to `end`. `runner`: vLLM's model runner; each call of its `execute_model` with tokens
    to compute is a step."""

    def __init__(self, runner: Any):
        self.done = 0
        self._runner, self._execute = runner, runner.execute_model
        self._profiler: Any = torch.profiler.profile(activities=torch.profiler.supported_activities())
        self._profiler.start()
        runner.execute_model = self._counted
        self._began_s = time.perf_counter()

    def _counted(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        self.done += scheduled.total_num_scheduled_tokens > 0
        return self._execute(scheduled, *arguments, **named)

    def end(self, path: str | None) -> dict[str, Any]:
        """{"steps", "seconds", "share", "operators" (runtime.profile_shares.shares), "trace", "bytes"}. path: of the
        trace file; None: without."""
        seconds = time.perf_counter() - self._began_s
        del self._runner.execute_model  # what stood in front of the method of its class
        self._profiler.stop()
        events = self._profiler.events()
        collectives = distributed.get_backend() if distributed.is_initialized() else "none"
        found = {"steps": self.done, "seconds": seconds, **shares(events, seconds, collectives)}
        if path is None or len(events) > MOST_EVENTS:
            return {**found, "trace": None, "bytes": 0}
        self._profiler.export_chrome_trace(path)
        return {**found, "trace": path, "bytes": Path(path).stat().st_size}
