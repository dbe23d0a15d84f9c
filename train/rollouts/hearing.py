"""What the ranks hear from whoever runs their job: answers to rank 0's questions, and that the devices are wanted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import comm

from train.control.progress import ControlSignals, Events, Progress
from train.state.fragments import Grid

ASK_AGAIN_S = 10.0
_LOOK_EVERY_S = 0.01


class Hearing:
    """What one rank hears."""

    def __init__(self, grid: Grid, device: torch.device, emit: Events, signals: ControlSignals, progress: Progress):
        self._grid, self._device = grid, device
        self._emit, self._signals, self._progress = emit, signals, progress
        self._asked_s: dict[str, float] = {}  # time.monotonic() by question, of those that wait for their answers

    def ask(self, question: str, asked: dict[str, Any], then: Callable[[Any], None] | None = None) -> None:
        """On rank 0: asks without waiting for the answer. then: is called with it as soon as it arrives, on the thread
        that brings it, in addition to `heard`."""
        if then is not None:
            self._signals.once_answered(question, then)
        self._asked_s[question] = time.monotonic()
        self._emit("ask", question=question, **asked)

    def heard(self, question: str, asked: dict[str, Any]) -> tuple[bool, Any]:
        """Collective: whether rank 0 was answered, and on rank 0 the answer; not answered if the devices are wanted
        first. asked: rank 0 asks this unless it already has, and again after a while: the controller may have been
        replaced by another one."""
        answer = None
        while True:
            if self._grid.rank == 0:
                answer = self._signals.take_answer(question)
                if answer is None and time.monotonic() - self._asked_s.get(question, -ASK_AGAIN_S) > ASK_AGAIN_S:
                    self.ask(question, asked)
                    answer = self._signals.take_answer(question)
            wanted, waiting = self.agreed(self._grid.rank == 0 and answer is None)
            if not waiting:
                self._asked_s.pop(question, None)
                return True, answer
            if wanted:
                return False, None
            time.sleep(_LOOK_EVERY_S)

    def agreed(self, going: bool) -> tuple[bool, bool]:
        """Collective: whether the devices are wanted, and whether any rank goes on."""
        self._progress.enter(self._progress.phase)
        signals = self._signals
        message = torch.tensor([float(signals.suspend or signals.cancel), float(going)], device=self._device)
        comm.all_reduce(message)
        wanted, others = message.tolist()
        return wanted > 0, others > 0
