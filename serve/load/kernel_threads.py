"""How many threads torch's kernels take, by the Python thread that calls them, in a process that was forked.

What is known, read in the sources and the binary and reproduced by tests/unit/serve/test_kernel_threads.py:

- torch 2.13 takes the pool that a forked process inherited away, and then makes another one, the next time a thread
  asks for it; nothing is locked (caffe2/utils/threadpool/pthreadpool-cpp.cc). Who asks in between gets none and fails:
  "Invalid thread pool!". A new thread asks in its first kernel, where the interpreter's lock is not held
  (`lazy_init_num_threads`). A main thread that computed before the fork does not ask again, so the first threads do.
- vLLM 0.32's CPU worker makes `torch.set_num_threads` do nothing (vllm/v1/worker/cpu_worker.py). The function that
  torch itself has under that name does what it says.
- Calls of it and of `torch.get_num_threads` hold the interpreter's lock throughout: they never meet.
"""

from __future__ import annotations

import torch

_set_num_threads = torch._C.set_num_threads


def renew_pool() -> None:
    """Have torch replace the pool that this process inherited. For the main thread, before any other computes."""
    _set_num_threads(torch.get_num_threads())


def set_kernel_threads(count: int) -> None:
    """Have kernels that this thread calls take `count` threads, and those of threads that are new as many."""
    torch.get_num_threads()  # else the first kernel looks the number up, and with it the pool
    _set_num_threads(count)
