"""Sets the number of threads of torch's kernels per calling Python thread, in a forked process.

Known facts, read in the sources and the binary and reproduced by tests/unit/serve/test_kernel_threads.py:

- When a thread requests the pool that a forked process inherited, torch 2.13 removes it and then creates another one,
  without a lock (caffe2/utils/threadpool/pthreadpool-cpp.cc). A thread that requests it in between gets none and fails
  with "Invalid thread pool!". A new thread requests it in its first kernel, without the interpreter's lock
  (`lazy_init_num_threads`). A main thread that computed before the fork does not request it again, so the first new
  threads do.
- vLLM 0.32's CPU worker replaces `torch.set_num_threads` with a no-op (vllm/v1/worker/cpu_worker.py). torch's own
  function of that name still works.
- It and `torch.get_num_threads` hold the interpreter's lock throughout, so their calls never overlap.
"""

from __future__ import annotations

import torch

_set_num_threads = torch._C.set_num_threads


def renew_pool() -> None:
    """Make torch replace the inherited pool. Call it in the main thread before any other thread computes."""
    _set_num_threads(torch.get_num_threads())


def set_kernel_threads(count: int) -> None:
    """Let kernels that this thread or a new thread calls use `count` threads."""
    torch.get_num_threads()  # otherwise the first kernel looks up the number, and with it the pool
    _set_num_threads(count)
