"""What a neighbour of many long prompts waits for: vLLM's scheduler, paced and in turns by owner, on an engine whose
time is computed, each step as long as one of SmolLM2-135M on one core."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

from serve.api import adapter_steps, unfit_requests
from serve.api.turns import ROLLOUTS, Turns, behind, mark_of, number
from serve.vllm.arguments import CPU_PROMPT_TOKENS
from serve.vllm.fairness import owner_places

STEP_S, TOKEN_S = 0.03, 1 / 130
PROMPTS, LONG = 8, 1700
BLOCK = 16
PLACES = 64
LOAD_S, RESIDENT = 0.3, 32


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Engine:
    """One scheduler, and the times at which each request got its tokens. paced: as this project has it, or as vLLM.
    ahead: that of GPUs, which takes a step before the tokens of the one before are known."""

    def __init__(
        self,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        paced: bool,
        bounds_loads: bool = True,
        blocks: int = 4000,
        passes: bool = True,
        ahead: bool = False,
    ) -> None:
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        self.clock, self.turns, self.paced, self.makes_room = Clock(), Turns(), paced, True
        for module in (owner_places, adapter_steps, unfit_requests):
            monkeypatch.setattr(module, "time", self.clock)
        (root / "config.json").write_text(
            json.dumps(
                {
                    "architectures": ["LlamaForCausalLM"],
                    "model_type": "llama",
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "vocab_size": 512,
                    "max_position_embeddings": 4096,
                    "torch_dtype": "float32",
                }
            )
        )
        config = VllmConfig(
            model_config=ModelConfig(model=str(root), skip_tokenizer_init=True, dtype="float32", max_model_len=4096),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
            scheduler_config=SchedulerConfig(
                max_num_seqs=PLACES,
                max_num_batched_tokens=2048,
                max_model_len=4096,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                long_prefill_token_threshold=CPU_PROMPT_TOKENS if paced else 0,
                policy="priority" if paced else "fcfs",
            ),
        )
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        memory = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        made = AsyncScheduler if ahead else Scheduler
        self.scheduler = made(
            vllm_config=config,
            kv_cache_config=memory,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        if paced and bounds_loads:
            for name, changed in (
                ("schedule", adapter_steps.bounded),
                ("update_from_output", adapter_steps.measured),
                ("_handle_blocked_waiting_request", adapter_steps.held_back),
            ):
                setattr(self.scheduler, name, MethodType(changed(self._with_room(name)), self.scheduler))
        if paced and passes:
            manager: Any = self.scheduler.kv_cache_manager
            manager.allocate_slots = MethodType(unfit_requests.noted(type(manager).allocate_slots), manager)
        self.tokens: dict[str, list[float]] = {}
        self.places: dict[str, int] = {}
        self.loaded: list[int] = []  # adapters, the one that was used last at the end

    def ask(self, owner: str, name: str, prompt: int, most: int, adapter: int = 0) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.places[name] = self.turns.enter(owner, prompt) if self.paced else 0
        priority = number(behind(owner, self.places[name]), mark_of(owner)) if self.paced else 0
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        self.tokens[name] = []
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=[1] * prompt,
                sampling_params=params,
                pooling_params=None,
                arrival_time=self.clock.now_s,
                priority=priority,
                lora_request=LoRARequest(f"a{adapter}", adapter, "/nowhere") if adapter else None,
            )
        )

    def first_s(self, owner: str, name: str, prompt: int = 20) -> float:
        """Seconds until a short request that is made now has its first token."""
        began_s = self.clock.now_s
        self.ask(owner, name, prompt, 2)
        while not self.tokens[name]:
            self.step()
        return self.tokens[name][0] - began_s

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        self.clock.now_s += STEP_S + TOKEN_S * output.total_num_scheduled_tokens + LOAD_S * self.load()
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        done = [requests[name].num_computed_tokens >= requests[name].num_tokens for name in names]
        for name, whole in zip(names, done, strict=True):
            if whole:
                if not self.tokens[name]:
                    self.turns.served(self.places[name])
                self.tokens[name].append(self.clock.now_s)
        made: dict[str, Any] = {
            "req_ids": names,
            "req_id_to_index": {name: place for place, name in enumerate(names)},
            "sampled_token_ids": [[7] if whole else [] for whole in done],
        }
        self.scheduler.update_from_output(output, ModelRunnerOutput(**made))

    def _with_room(self, name: str) -> Any:
        """A method of the scheduler; its schedule makes room first, if wanted."""
        plain = getattr(type(self.scheduler), name)
        if name == "schedule":
            plain = unfit_requests.looked_anew(plain)
        if name == "_handle_blocked_waiting_request":
            return unfit_requests.let_pass(plain)
        makes = owner_places._with_room(plain)
        return plain if name != "schedule" else lambda scheduler: (makes if self.makes_room else plain)(scheduler)

    def load(self) -> int:
        """What a worker does before it computes a step; how many adapters it lacked."""
        wanted = {one.lora_request.lora_int_id for one in self.scheduler.running if one.lora_request}
        lacked = wanted - set(self.loaded)
        self.loaded = [*(one for one in self.loaded if one not in wanted), *wanted][-RESIDENT:]
        return len(lacked)


def neighbour(engine: Engine) -> float:
    """Longest wait for a token of a stream while another owner's long prompt is computed."""
    engine.ask("neighbour", "stream", 20, 4000)
    while len(engine.tokens["stream"]) < 10:
        engine.step()
    began_s = engine.clock.now_s
    engine.ask("many", "long", LONG, 2)
    while len(engine.tokens["long"]) < 2:
        engine.step()
    seen = [at for at in engine.tokens["stream"] if at >= began_s - 1]
    return max(end - start for start, end in zip(seen, seen[1:], strict=False))


def test_stream_beside_a_long_prompt_waits_for_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert neighbour(Engine(tmp_path, monkeypatch, paced=False)) > 12
    assert neighbour(Engine(tmp_path, monkeypatch, paced=True)) < 2.1


def test_who_comes_while_two_long_prompts_are_computed_waits_for_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had all tokens of each step: the first token of a short request came after 24 s."""
    engine = Engine(tmp_path, monkeypatch, paced=True)
    for place in range(PROMPTS):
        engine.ask("many", f"long {place}", LONG, 2)
    for late in range(5):
        for _ in range(7):
            engine.step()
        assert engine.first_s(f"late {late}", f"short {late}") < 2.5


def test_whose_prompts_are_computed_gets_as_much_as_others_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as much as came first of others: 100 tokens beside two long prompts waited until one of these ended, and a
    third owner's for one of two others'."""
    for owners in (["many", "many"], ["one", "two"]):
        engine = Engine(tmp_path, monkeypatch, paced=True)
        for place in range(PROMPTS):
            engine.ask(owners[place % 2], f"long {place}", LONG, 2)
        for _ in range(7):
            engine.step()
        assert engine.first_s("neighbour", "short", 100) < 4


def test_who_has_no_place_comes_before_who_has_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much more he has had: what others wait for has cost them nothing yet. Behind 32 choices of eight
    requests a short one waited for all of them."""
    engine = Engine(tmp_path, monkeypatch, paced=True)
    for one in range(32):
        engine.ask("many", f"choice {one}", 60, 200)
    engine.turns.took("neighbour", 5000)
    engine.step()
    assert engine.first_s("neighbour", "short", 40) < 2


def crowded(engine: Engine, *, makes_room: bool) -> float:
    """First token of a short request while another owner writes as many long answers as there are places."""
    engine.makes_room = makes_room
    for one in range(PLACES + 40):
        engine.ask("many", f"long {one}", 20, 400)
    for _ in range(80):
        engine.step()
    return engine.first_s("neighbour", "short")


def test_nobody_has_all_places_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert crowded(Engine(tmp_path, monkeypatch, paced=True), makes_room=False) > 100, "as it was"
    engine = Engine(tmp_path, monkeypatch, paced=True)
    assert crowded(engine, makes_room=True) < 3
    # Further questions, each at once after the one before, cost the other owner one place and few tokens.
    for one in range(20):
        engine.ask("neighbour", f"more {one}", 20, 2)
        while len(engine.tokens[f"more {one}"]) < 2:
            engine.step()
    ended = [name for name in engine.tokens if name.startswith("long") and len(engine.tokens[name]) >= 400]
    steps = 0
    while not all(len(engine.tokens[f"long {one}"]) >= 400 for one in range(PLACES)):
        engine.step()
        steps += 1
    assert not ended and steps < 500, "all are written to their end"


class Ahead:
    """As an engine on a GPU steps: the next step is scheduled, and given to the runner, before the tokens of this one
    are known. Of vLLM's second runner here are the slots; the token that it writes is the place that it has."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.slots = scheduler, dict[str, list[int]]()
        scheduler.use_v2_model_runner = True
        self._on_its_way = deque[tuple[Any, dict[str, list[int]]]]()

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        self._on_its_way.append((output, self._computed(output)))
        if len(self._on_its_way) == 2:
            output, made = self._on_its_way.popleft()
            told = {
                "req_id_to_index": {name: at for at, name in enumerate(made)},
                "sampled_token_ids": [*made.values()],
            }
            self.scheduler.update_from_output(output, ModelRunnerOutput(req_ids=[*made], **told))

    def _computed(self, output: Any) -> dict[str, list[int]]:
        for name in {*output.finished_req_ids, *output.preempted_req_ids}:
            self.slots.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.slots[new.req_id] = [new.num_computed_tokens, len(new.prefill_token_ids)]
        assert len(self.slots) <= PLACES, "the runner has no more slots"
        made = {}
        for name, tokens in output.num_scheduled_tokens.items():
            self.slots[name][0] += tokens
            computed, known = self.slots[name]
            made[name] = [computed] if computed >= known else []
        return made


def test_an_answer_that_gives_up_its_place_has_each_of_its_tokens_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU one of them is on its way when it does, and comes when it has no place any more."""
    engine = Engine(tmp_path, monkeypatch, paced=True, ahead=True)
    runner, asked = Ahead(engine.scheduler), list[Any]()

    def ask(owner: str, name: str, most: int) -> None:
        engine.ask(owner, name, 20, most)
        asked.append(engine.scheduler.requests[name])

    for one in range(PLACES + 8):
        ask("many", f"long {one}", 120)
    for turn in range(1000):
        if turn % 20 == 10 and turn < 200:
            ask(f"neighbour {turn % 3}", f"short {turn}", 3)
        runner.step()
        engine.clock.now_s += STEP_S
        if not engine.scheduler.requests:
            break
    assert sum(one.num_preemptions for one in asked) > 3
    for one in asked:
        assert list(one.output_token_ids) == list(range(20, 20 + one.max_tokens)), one.request_id


@pytest.mark.parametrize("adapters, given", [(1, 0), (2, 1)])
def test_no_place_is_given_to_a_request_whose_adapter_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: int, given: int
) -> None:
    engine = Engine(tmp_path, monkeypatch, paced=True)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=adapters, max_cpu_loras=RESIDENT)
    monkeypatch.setattr(owner_places, "TURN_S", 1e6)
    for one in range(PLACES):
        engine.ask("many", f"long {one}", 20, 400, adapter=1)
    for _ in range(40):
        engine.step()
    assert len(engine.scheduler.running) == PLACES
    engine.ask("neighbour", "short", 20, 2, adapter=2)
    for _ in range(5):
        engine.step()
    assert sum(request.num_preemptions for request in engine.scheduler.requests.values()) == given
    assert bool(engine.tokens["short"]) == bool(given)
    monkeypatch.setattr(owner_places, "TURN_S", 1.0)
    began_s = engine.clock.now_s
    while not engine.tokens["short"]:
        engine.step()
    assert engine.clock.now_s - began_s < 2, "the only place for an adapter goes round"


def test_how_many_wait_for_an_adapter_makes_no_look_at_the_batch_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Batch(list[Any]):
        looks = 0

        def __iter__(self) -> Any:
            self.looks += 1
            return super().__iter__()

    engine = Engine(tmp_path, monkeypatch, paced=True)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1, max_cpu_loras=RESIDENT)
    for one in range(4):
        engine.ask("many", f"long {one}", 20, 400, adapter=1)
    engine.step()
    looks = []
    for waiting in range(10):
        engine.ask("neighbour", f"waits {waiting}", 20, 2, adapter=2)
        engine.scheduler.running = Batch(engine.scheduler.running)
        owner_places.give_turns(engine.scheduler)
        owner_places.make_room(engine.scheduler, engine.clock.now_s)
        looks.append(engine.scheduler.running.looks)
    assert looks[-1] == looks[0] > 0


def adapters_taken(engine: Engine, owners: list[str], *, makes_room: bool = True) -> float:
    """First token for an adapter of somebody else while these owners, one for each place for adapters, write long
    answers with theirs."""
    engine.scheduler.lora_config = SimpleNamespace(max_loras=len(owners), max_cpu_loras=RESIDENT)
    engine.makes_room = makes_room
    for place, owner in enumerate(owners):
        for one in range(2):
            engine.ask(owner, f"long {place} {one}", 20, 800, adapter=place + 1)
    for _ in range(80):  # until all are loaded
        engine.step()
    began_s = engine.clock.now_s
    engine.ask("neighbour", "short", 20, 4, adapter=9)
    while not engine.tokens["short"]:
        engine.step()
    return engine.tokens["short"][0] - began_s


@pytest.mark.parametrize("owners, at_most_s", [(["many"] * 4, 1.0), (["one", "two", "three", "four"], 6.5)])
def test_nobody_keeps_others_adapters_from_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owners: list[str], at_most_s: float
) -> None:
    assert adapters_taken(Engine(tmp_path, monkeypatch, paced=True), owners, makes_room=False) > 50, "as it was"
    engine = Engine(tmp_path, monkeypatch, paced=True)
    assert adapters_taken(engine, owners) < at_most_s
    while len(engine.tokens["short"]) < 4:
        engine.step()
    steps = 0
    while not all(len(engine.tokens[f"long {place} {one}"]) == 800 for place in range(4) for one in range(2)):
        engine.step()
        steps += 1
    assert steps < 850, "all are written to their end, and nobody gives way any more"


def adapters_come_and_go(engine: Engine) -> tuple[float, float, float]:
    """(longest wait for a token of a stream, its tokens in ten seconds, first token for an adapter of its owner) while
    another owner asks for twice as many adapters as stay loaded, one short answer after the other."""
    engine.scheduler.lora_config = SimpleNamespace(max_loras=4, max_cpu_loras=RESIDENT)
    engine.ask("neighbour", "stream", 20, 4000)
    while len(engine.tokens["stream"]) < 10:
        engine.step()
    began_s, asked = engine.clock.now_s, 0
    while engine.clock.now_s < began_s + 10:
        while asked < 8 or engine.tokens[f"many {asked - 8}"]:
            engine.ask("many", f"many {asked}", 1, 1, adapter=1 + asked % (2 * RESIDENT))
            asked += 1
        engine.step()
    seen = [at for at in engine.tokens["stream"] if at >= began_s]
    asks_s = engine.clock.now_s
    engine.ask("neighbour", "short", 20, 1, adapter=1000)
    while not engine.tokens["short"]:
        engine.step()
    gap_s = max(end - start for start, end in zip(seen, seen[1:], strict=False))
    return gap_s, len(seen), engine.tokens["short"][0] - asks_s


def test_nobodys_adapters_keep_an_engine_from_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gap_s, tokens, _ = adapters_come_and_go(Engine(tmp_path, monkeypatch, paced=True, bounds_loads=False))
    assert gap_s > 4 * LOAD_S and tokens < 10, "as it was"
    gap_s, tokens, first_s = adapters_come_and_go(Engine(tmp_path, monkeypatch, paced=True))
    assert gap_s < 1.5 * LOAD_S and tokens > 80, (gap_s, tokens)
    assert first_s < 4 * LOAD_S, first_s


def one_asks_for_all_memory(engine: Engine) -> float:
    """First token of a short request while another owner's prompt is longer than what two small answers of theirs leave
    of the KV memory."""
    engine.ask("neighbour", "before", 200, 2)
    for one in range(2):
        engine.ask("many", f"answer {one}", 1, 500)
    for _ in range(20):
        engine.step()
    engine.ask("many", "long", 4080, 2)
    engine.step()
    return engine.first_s("neighbour", "short")


def test_a_prompt_that_finds_no_memory_keeps_nobody_else_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = 4096 // BLOCK + 2
    engine = Engine(tmp_path, monkeypatch, paced=True, blocks=memory, passes=False)
    engine.makes_room = False
    assert one_asks_for_all_memory(engine) > 15, "as it was"
    engine = Engine(tmp_path, monkeypatch, paced=True, blocks=memory)
    assert one_asks_for_all_memory(engine) < 1
    # It finds memory, however many short ones of others come meanwhile; those of its owner wait for it.
    began_s, asked = engine.clock.now_s, 0
    while "long" not in {one.request_id for one in engine.scheduler.running}:
        if not asked or len(engine.tokens[f"more {asked - 1}"]) == 20:
            engine.ask("neighbour", f"more {asked}", 20, 20)
            engine.ask("many", f"mine {asked}", 20, 20)
            asked += 1
        engine.step()
    assert asked > 10 and engine.clock.now_s - began_s < 120 and len(engine.tokens["mine 0"]) < 2


def first_with_an_adapter(engine: Engine, owner: str, waits: int, prompt: int, answers: int = 0) -> float:
    """First token of a neighbour's adapter that is to be loaded while this owner's request waits with another one."""
    engine.scheduler.lora_config = SimpleNamespace(max_loras=4, max_cpu_loras=RESIDENT)
    engine.ask("neighbour", "before", 20, 1, adapter=RESIDENT)
    while not engine.tokens["before"]:
        engine.step()
    for one in range(2):
        for adapter in range(4):
            engine.ask("many", f"answer {one} {adapter}", 1, 500, adapter=answers and adapter + 1)
    for _ in range(40):
        engine.step()
    engine.ask(owner, "waits", prompt, 2, adapter=waits)
    engine.step()
    began_s = engine.clock.now_s
    engine.ask("neighbour", "short", 20, 2, adapter=9)
    while not engine.tokens["short"]:
        engine.step()
    return engine.tokens["short"][0] - began_s


def test_an_adapter_that_no_step_takes_keeps_nobody_elses_from_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the one that each step might load for as long as it waited: for memory, or for a place beside those of
    others where no room is made for rollouts."""
    engine = Engine(tmp_path, monkeypatch, paced=True, blocks=4096 // BLOCK + 10)
    assert first_with_an_adapter(engine, "many", 5, 4080) < 1
    assert first_with_an_adapter(Engine(tmp_path, monkeypatch, paced=True), ROLLOUTS, 5, 20, answers=1) < 1.5


def test_a_request_that_found_no_memory_is_taken_as_soon_as_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while other prompts are computed, which will need more than they have."""
    engine = Engine(tmp_path, monkeypatch, paced=True, blocks=4096 // BLOCK + 2)
    engine.ask("many", "answer", 1500, 4)
    while not engine.tokens["answer"]:
        engine.step()
    engine.ask("many", "long", 2700, 2)
    engine.ask("neighbour", "prompt", 1200, 2)
    while len(engine.tokens["answer"]) < 4:
        engine.step()
    assert not engine.tokens["prompt"], "it is still computed"
    engine.step()
    engine.step()
    assert "long" in {one.request_id for one in engine.scheduler.running}
