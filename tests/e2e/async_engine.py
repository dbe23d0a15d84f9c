"""A CPU engine with vLLM's asynchronous scheduling, which every GPU engine uses.

vLLM's CPU platform always disables it ("not required on CPU", vllm/platforms/cpu.py); `main` keeps the setting of the
command line, and otherwise runs the normal serving engine.
"""

import sys
from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from runtime.processes.lifeline import Lifeline

AHEAD = "a step was scheduled before the tokens of the one before it were known"


class SayingScheduler(AsyncScheduler):
    """The scheduler that vLLM uses on GPUs. Logs once that a step was really scheduled ahead."""

    said = False

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        waiting_for = [request for request in self.running if request.num_output_placeholders]
        output = super().schedule(throttle_prefills)
        if not self.said and any(request.request_id in output.num_scheduled_tokens for request in waiting_for):
            self.said = True
            print(AHEAD, file=sys.stderr, flush=True)
        return output


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    from serve.engine import main as engine

    adjust = CpuPlatform.check_and_update_config.__func__

    def check(platform: type[CpuPlatform], config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        adjust(platform, config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check)  # type: ignore[method-assign]
    return engine.main(lifeline, args)
