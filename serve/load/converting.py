"""Converts the layers of a version with several threads, in a process that also answers requests."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, Self, TypeVar

import torch

from runtime.libc import libc
from serve.load.kernel_threads import set_kernel_threads

Item = TypeVar("Item", bound=Hashable)

# The interpreter's switch interval while threads convert: a thread that returns from a kernel waits this long for one
# that computes in Python. The default is 5 ms, the time of several layers.
SWITCH_INTERVAL_S = 0.0002


class Converting(Generic[Item]):
    """Items that several threads convert at once. Each item is converted by one thread; they begin in order.

    The owning thread also converts whenever it would wait. Leaving the block waits for conversions that have begun and
    drops the rest.
    """

    def __init__(self, items: Iterable[Item], convert: Callable[[Item], None], threads: int):
        """`threads` includes the owner's. In the other threads, kernels of `convert` are single-threaded."""
        self._convert = convert
        self._futures: dict[Item, Future[None]] = {item: Future() for item in items}
        self._left = deque(self._futures)
        self._threads = threads

    def wait_for(self, item: Item) -> None:
        """Return when the item is converted; convert others meanwhile. Re-raises the error of the first failed
        conversion."""
        future = self._futures[item]
        while not future.done() and self._convert_next():
            pass
        future.result()

    def wait_for_all(self) -> None:
        for item in self._futures:
            self.wait_for(item)

    def _convert_next(self) -> bool:
        """Convert the next item that no thread has begun; False if none is left."""
        try:
            item = self._left.popleft()
        except IndexError:
            return False
        try:
            self._convert(item)
        except BaseException as error:  # noqa: BLE001 - carried to `wait_for`, which raises it
            self._futures[item].set_exception(error)
            while self._left:
                with suppress(IndexError):
                    self._futures[self._left.popleft()].set_exception(error)
        else:
            self._futures[item].set_result(None)
        return True

    def _convert_all(self) -> None:
        os.sched_setaffinity(0, self._cores)
        set_kernel_threads(1)
        while self._convert_next():
            pass

    def __enter__(self) -> Self:
        self._before = torch.get_num_threads(), sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        cores = os.sched_getaffinity(0)
        # Otherwise all of them may run on this thread's core while the other cores have any work, even of the lowest
        # priority: on two cores, one alone converted many loads.
        self._cores = cores - {libc.sched_getcpu()} or cores
        self._others = [threading.Thread(target=self._convert_all, name="convert") for _ in range(self._threads - 1)]
        for thread in self._others:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.clear()
        for thread in self._others:
            thread.join()
        kernel_threads, interval_s = self._before
        sys.setswitchinterval(interval_s)
        set_kernel_threads(kernel_threads)
