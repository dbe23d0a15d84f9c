"""What the ranks hear from whoever runs their job: answers to rank 0's questions, and that the devices are wanted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import inf
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

    def ask(self, questions: Mapping[str, dict[str, Any]]) -> None:
        """On rank 0: asks without waiting for the answers. questions: what is asked, by the question's name."""
        for name, asked in questions.items():
            self._asked_s[name] = time.monotonic()
            self._emit("ask", question=name, **asked)

    def heard(self, questions: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
        """Collective: the answers to rank 0's questions, there alone; None if the devices are wanted first. Rank 0 asks
        those that it has not asked yet, and all again after a while: the controller may have been replaced by another
        one."""
        answers: dict[str, Any] = {}
        while True:
            for name in questions.keys() - answers.keys():  # first: what was asked ahead may be there
                if (answer := self._signals.take_answer(name)) is not None:
                    answers[name] = answer
                    del self._asked_s[name]
            missing = {name: asked for name, asked in questions.items() if name not in answers}
            since_s = time.monotonic() - ASK_AGAIN_S
            self.ask({name: asked for name, asked in missing.items() if self._asked_s.get(name, -inf) < since_s})
            wanted, waiting = self.agreed(bool(missing))
            if not waiting:
                return {name: answers[name] for name in questions}
            if wanted:
                return None
            time.sleep(_LOOK_EVERY_S)

    def agreed(self, going: bool) -> tuple[bool, bool]:
        """Collective: whether the devices are wanted, and whether any rank goes on."""
        self._progress.enter(self._progress.phase)
        signals = self._signals
        message = torch.tensor([float(signals.suspend), float(going)], device=self._device)
        comm.all_reduce(message)
        wanted, others = message.tolist()
        return wanted > 0, others > 0
