"""Leaves a step during forward or backward, which change nothing but gradients.

Until the optimizer steps, weights, moments and step counter are those of the last step boundary, and a step's number
determines its tokens, dropout and learning rate. So a rank can leave a step at any point before that and repeat it
later, bit by bit the same: only the time spent is lost.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from train.control.stop_point import POINTS_PER_STEP, StopPoint
from train.state import fragments

KEPT_S = 60.0
"""How long a step that was left last time goes on, at least."""
_LOOK_EVERY_S = 1.0


class StepLeft(Exception):
    """Raised inside a step, on every rank at the same point."""


class Leaving:
    """One rank's part of it. On rank 0 `ask` decides; on all ranks `point` raises StepLeft where they leave.

    patience_s: a step expected to end within this time is not left, nor, for KEPT_S, is the step that was left last
    time, so that a job makes progress however often its devices are taken. While it goes on it is looked at again: a
    step of an hour is no way to keep devices.
    """

    def __init__(self, engine: Any, stop: StopPoint, patience_s: float):
        self._engine, self._stop, self._patience_s = engine, stop, patience_s
        self._left_before = stop.left
        self._step, self._next, self._inside = 0, 0, False
        self._began_s, self._took_s = 0.0, float("inf")
        self._micro_steps = 0
        self._asked = False
        self._again: threading.Timer | None = None
        layers = layers_of(engine.module)
        self._hooks = [layer.register_forward_pre_hook(self._forward) for layer in layers]
        self._hooks += [layer.register_forward_hook(self._backward) for layer in layers]

    def close(self) -> None:
        """Remove the hooks; another run on this engine installs its own. Nothing is announced any more."""
        self._asked = True
        if self._again is not None:
            self._again.cancel()
        for hook in self._hooks:
            hook.remove()

    def at(self, step: int) -> None:
        """`step` steps are done."""
        self._step = step

    def begin(self) -> None:
        """The next step begins."""
        self._next, self._inside = (self._step + 1) * POINTS_PER_STEP, True
        self._micro_steps = self._engine.micro_steps
        self._began_s = time.monotonic()

    def point(self) -> None:
        """Raises StepLeft if all leave here."""
        if not self._inside:
            return
        self._next += 1
        if not self._stop.passes(self._next):
            raise StepLeft

    def stay(self) -> None:
        """From now on the step cannot be left: the optimizer is next."""
        self._inside = False

    def end(self) -> None:
        """The step is done."""
        self.at(self._step + 1)
        self._took_s = time.monotonic() - self._began_s

    def ask(self) -> None:
        """Rank 0 got a suspend or cancel: leave the current step if that is worthwhile. On any thread."""
        if self._asked:
            return
        if not self.worth_it(time.monotonic()):
            self._again = threading.Timer(_LOOK_EVERY_S, self.ask)
            self._again.daemon = True
            self._again.start()
            return
        self._asked = True
        self._stop.announce()

    def worth_it(self, now_s: float) -> bool:
        """Whether to leave the current step if the devices are requested now."""
        so_far_s = now_s - self._began_s
        if self._step == self._left_before:
            return self._inside and so_far_s > KEPT_S
        # One that takes twice as long as the last is not expected to end.
        left_s = self._took_s - so_far_s
        return not self._inside or left_s > self._patience_s or -left_s > max(self._took_s, self._patience_s)

    def forget(self) -> float:
        """After leaving the step, restore the engine to the step's beginning. Returns the seconds lost."""
        self._inside = False
        self._stop.left = self._step
        forget_gradients(self._engine, self._micro_steps)
        return time.monotonic() - self._began_s

    def _forward(self, layer: torch.nn.Module, inputs: Any) -> None:
        self.point()

    def _backward(self, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad and torch.is_grad_enabled():
            hidden.register_hook(lambda gradient: self.point())


def layers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's layers: its outermost list of modules; none if it has no such list."""
    return next((list(part) for part in module.modules() if isinstance(part, torch.nn.ModuleList)), [])


def forget_gradients(engine: Any, micro_steps: int) -> None:
    """Clear the state that forward and backward of an unfinished step left in a DeepSpeedEngine (0.19.8).

    Collective only in the sense that all ranks do it at the same point. A rank that offloads or runs under ZeRO-3 ends
    after it (train.state.parking), so only what a parked one would carry on is undone.
    """
    engine.micro_steps = micro_steps
    optimizer = engine.optimizer
    if fragments.is_zero3(engine):
        return
    if hasattr(optimizer, "clear_hp_grads"):  # BF16_Optimizer
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
    else:
        optimizer.zero_grad(set_to_none=True)
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()
        optimizer.params_already_reduced[:] = [False] * len(optimizer.params_already_reduced)
        optimizer._release_preflattened_grad_buffers()
        for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
        optimizer._release_ipg_buffers()
        optimizer.micro_step_id = -1  # its INITIAL_MICRO_STEP_ID
    while optimizer._backward_active_depth > 0:
        optimizer.exit_backward()
    optimizer.clear_backward_seen_flag()
