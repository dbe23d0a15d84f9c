"""Workers of one engine get ready at their own pace and compute together."""

import pytest

from serve.cpu.staged_answer import ask_staged

ANSWER = {"tokens": [1], "logprobs": [0.0]}


class Workers:
    """`searching` slices that each has to make ready; a layer is computed by all or the engine hangs."""

    def __init__(self, *searching: int, layers: int = 3, refused: int | None = None):
        self.searching, self.layers, self.refused = list(searching), layers, refused

    async def rpc(self, method: str):
        if method == "shm_ready_fingerprint":
            return [self._ready(worker) for worker in range(len(self.searching))]
        assert method == "shm_advance_fingerprint" and not any(self.searching), (
            "a worker waits for one that still searches"
        )
        self.layers -= 1
        return [None if self.layers else ANSWER] * len(self.searching)

    def _ready(self, worker: int):
        if self.searching[worker]:
            self.searching[worker] -= 1
            return None
        return {"refused": "leak"} if worker == self.refused else {}


@pytest.mark.parametrize("searching", [(0,), (0, 0), (3, 0), (0, 5), (2, 1, 4, 0)])
async def test_no_worker_computes_before_all_are_ready(searching):
    workers = Workers(*searching)
    assert await ask_staged(workers.rpc) == ANSWER and workers.layers == 0


@pytest.mark.parametrize("refused", [0, 1])
async def test_one_that_refuses_speaks_for_all_and_nothing_is_computed(refused):
    workers = Workers(0, 2, refused=refused)
    assert await ask_staged(workers.rpc) == {"refused": "leak"} and workers.layers == 3
