"""The fingerprint's pass on the slot table of vLLM's runner for GPUs, all of whose slots are taken at the pause."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu import buffer_utils, states
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from serve.vllm.fingerprint_pass import FINGERPRINT_REQUEST, run_fingerprint

SLOTS = 4


class OnHost:
    """Stands for vLLM's tensors that need a GPU; the slot table itself is vLLM's."""

    def __init__(self, size, dtype, **_):
        self.np = torch.zeros(size, dtype=dtype).numpy()

    def stage_write_elem(self, *_):
        pass

    def stage_write(self, *_):
        pass

    def apply_write(self):
        pass

    def copy_to_uva(self):
        pass


def ignored():
    def nothing(*_, **__):
        pass

    return SimpleNamespace(
        add_request=nothing, remove_request=nothing, apply_staged_writes=nothing, append_block_ids=nothing
    )


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    monkeypatch.setattr(states, "StagedWriteTensor", OnHost)
    monkeypatch.setattr(states, "UvaBackedTensor", OnHost)
    runner = object.__new__(GPUModelRunner)
    runner.req_states = states.RequestState(SLOTS, 128, 64, 0, 100, torch.device("cpu"))
    for name in ("model_state", "block_tables", "lora_state", "sampler", "prompt_logprobs_worker"):
        setattr(runner, name, ignored())
    for name in ("pooling_runner", "pp_handler", "encoder_cache", "adaptive_verification"):
        setattr(runner, name, None)
    runner.is_last_pp_rank = True
    return runner


def request(name):
    return NewRequestData(
        req_id=name,
        prompt_token_ids=[1, 2],
        mm_features=[],
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_ids=([1],),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=[1, 2],
    )


def step_of(*names, preempted=frozenset()):
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [request(name) for name in names]
    step.preempted_req_ids = set(preempted)
    return step


class Executor:
    """Updates the slots as GPUModelRunner.execute_model does before its forward pass, which needs a GPU."""

    def __init__(self, runner):
        self.runner = runner

    def execute_model(self, step):
        self.runner.finish_requests(step)
        self.runner.add_requests(step)

    def sample_tokens(self, _):
        logprobs = SimpleNamespace(logprob_token_ids=torch.tensor([[1, 7]]), logprobs=torch.tensor([[-1.0, -0.5]]))
        sampled = SimpleNamespace(logprobs=torch.tensor([[-0.25]]))
        return SimpleNamespace(
            prompt_logprobs_dict={FINGERPRINT_REQUEST: logprobs}, sampled_token_ids=[[9]], logprobs=sampled
        )


def paused(runner, finished=(), preempted=()):
    scheduler = SimpleNamespace(
        pause_state=SimpleNamespace(name="PAUSED_ALL"),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        finished_req_ids=set(finished),
        reset_preempted_req_ids=set(preempted),
    )
    return SimpleNamespace(scheduler=scheduler, model_executor=Executor(runner))


@pytest.mark.parametrize("finished", [(), ("r3",), ("r0", "r1", "r2", "r3")])
def test_a_full_batch_leaves_the_fingerprint_a_slot(runner, finished):
    names = [f"r{index}" for index in range(SLOTS)]
    runner.add_requests(step_of(*names))
    core = paused(runner, finished, set(names) - set(finished))
    assert run_fingerprint(core, [1, 2], None) == {"tokens": [7, 9], "logprobs": [-0.5, -0.25]}
    assert runner.req_states.num_reqs == 0
    # The scheduler's next step names the preempted requests once more, and brings them back.
    runner.finish_requests(step_of(preempted=core.scheduler.reset_preempted_req_ids))
    runner.add_requests(step_of(*names))
    assert sorted(runner.req_states.req_id_to_index) == names
    assert len(set(runner.req_states.req_id_to_index.values())) == SLOTS


def test_the_scheduler_still_names_them_in_its_own_next_step(runner):
    core = paused(runner, {"gone"}, {"kept"})
    run_fingerprint(core, [1, 2], None)
    assert core.scheduler.finished_req_ids == {"gone"}
    assert core.scheduler.reset_preempted_req_ids == {"kept"}
