"""How many threads torch's kernels take, by the Python thread that calls them, in a process that was forked.

What is known, read in the sources and the binary and reproduced by tests/unit/serve/test_kernel_threads.py:

- When a thread asks for the pool that a forked process inherited, torch 2.13 takes it away and then makes another one,
  without a lock (caffe2/utils/threadpool/pthreadpool-cpp.cc). A thread that asks in between gets none and fails with
  "Invalid thread pool!". A new thread asks in its first kernel, where it does not hold the interpreter's lock
  (`lazy_init_num_threads`). A main thread that computed before the fork does not ask again, so the first new threads
  do.
- vLLM 0.32's CPU worker makes `torch.set_num_threads` do nothing (vllm/v1/worker/cpu_worker.py). The function that
  torch itself has under that name does what it says.
- Calls of it and of `torch.get_num_threads` hold the interpreter's lock throughout, so they never overlap.
"""

from __future__ import annotations

import torch

_set_num_threads = torch._C.set_num_threads


def renew_pool() -> None:
    """Have torch replace the pool that this process inherited. Call it in the main thread before any other computes."""
    _set_num_threads(torch.get_num_threads())


def set_kernel_threads(count: int) -> None:
    """Let kernels that this thread or a new thread calls use `count` threads."""
    torch.get_num_threads()  # otherwise the first kernel looks up the number, and with it the pool
    _set_num_threads(count)
