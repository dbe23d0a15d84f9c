"""The pinned vLLM still has the internals that serve relies on; checked in a process forked from the warm parent
(importing vLLM takes 12 s). Internals that tests with real engines cover are not repeated here.
"""

import importlib
import inspect
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from runtime.devices import kinds
from runtime.processes.child import Child
from runtime.processes.lifeline import Lifeline

V1, OPENAI, ANTHROPIC = "vllm.v1", "vllm.entrypoints.openai", "vllm.entrypoints.anthropic"
SCHEDULER, FORMS = f"{V1}.core.sched.scheduler:Scheduler", f"{V1}.structured_output:StructuredOutputManager"
CHECK = "vllm.sampling_params:SamplingParams._validate_structured_outputs"
STRICT = "vllm.parser.abstract_parser:DelegatingParser._apply_structural_tag"
PROMPT_LOGPROBS = f"{V1}.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict"
# Purpose, place (module, or module:attribute), and text that its source must contain.
WORDS = (
    ("cause of a core's end", f"{V1}.engine.core", 'logger.exception("EngineCore encountered a fatal error.")'),
    ("cause of a worker's end", f"{V1}.executor.multiproc_executor", 'logger.exception("WorkerProc failed to start.")'),
    ("cause of a core's end", f"{V1}.engine.utils:wait_for_engine_startup", "launch.engine_manager.finished_procs()"),
    ("our own pause", f"{V1}.engine.async_llm:AsyncLLM.pause_generation", "sleep(0.02)"),
    ("our own wake", f"{V1}.engine.core:EngineCore.wake_up", "resume_scheduler()"),
    *(
        ("priority", f"{OPENAI}.{where}", "self._get_priority(request, raw_request)")
        for where in (
            "chat_completion.serving:OpenAIServingChat",
            "completion.serving:OpenAIServingCompletion",
            "responses.serving:OpenAIServingResponses",
        )
    ),
    ("priority", f"{ANTHROPIC}.serving:AnthropicServingMessages", "create_chat_completion(chat_req, raw_request)"),
    ("salt of caches", f"{V1}.core.kv_cache_utils:generate_block_hash_extra_keys", "request.cache_salt"),
    ("token of a form", f"{FORMS}.accept_tokens", "grammar.accept_tokens("),
    ("refused token", f"{SCHEDULER}.update_from_output", "self.structured_output_manager.accept_tokens("),
    ("refused token", f"{SCHEDULER}.update_from_output", "RequestStatus.FINISHED_ERROR"),
    ("check of a form", CHECK, "validate_guidance_grammar("),
    ("our backend", f"{FORMS}.grammar_init", "self.backend = GuidanceBackend("),
    ("compiled between steps", f"{FORMS}.grammar_init", "self.executor.submit(self._create_grammar, request)"),
    ("a form with strict tools", STRICT, "_xgrammar_supports(structured_outputs)"),
    *(
        ("log-probabilities of prompts", PROMPT_LOGPROBS, words)
        for words in (
            "offset = self.query_start_loc.np[req_idx].item()",
            "hidden_states[offset : offset + num_logits]",
            "start_idx = request.num_computed_tokens",
            "num_tokens = num_scheduled_tokens.get(req_id)",
        )
    ),
)


async def test_vllm_has_required_internals(engine_box):
    child = await Child.spawn(
        engine_box.warm_socket, f"{__name__}:main", {}, log_path=engine_box.logs / "contract.log", name="contract"
    )
    event = await child.next_event()
    await child.closed()
    assert event["event"] == "contract" and event["failures"] == [], event


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """Report `{"event": "contract", "failures": [...]}`."""
    missing = [f"{what}: {where} lacks {words!r}" for what, where, words in WORDS if words not in _source(where)]
    lifeline.emit("contract", failures=missing + [text for text, holds in _claims() if not holds])
    return 0


def _source(where: str) -> str:
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return inspect.getsource(inspect.unwrap(found))


def _claims() -> Iterator[tuple[str, bool]]:
    import torch
    from vllm.config import ModelConfig
    from vllm.entrypoints.generate.base import serving as base_serving

    from serve.engine import main as engine
    from serve.engine import preload

    yield "a request's priority comes in a header", base_serving.PRIORITY_HEADER.lower() == "x-vllm-priority"
    yield "the warm parent built the parser", engine.PARSER.prog is not None and preload.IMPORTED > 20
    preloaded = {name for kind in kinds.KINDS.values() if not kind.on_host for name in preload.names(kind)}
    stand_ins = ("serve.vllm.cpu_worker", "vllm.v1.worker.cpu")
    yield "the preload of GPUs leaves vLLM's stand-ins alone", not any(n.startswith(stand_ins) for n in preloaded)
    hashed = '"model"' not in inspect.getsource(ModelConfig.compute_hash)  # its source lists the ignored fields
    described = {field.name for field in fields(ModelConfig)}
    yield "the hash of compiled graphs is of the model's path too", "model" in described and hashed
    yield "no thread was inherited but main and lifeline", threading.active_count() <= 2
    yield "CUDA was not initialised in the warm parent", not torch.cuda.is_initialized()
    yield "one OpenMP thread", torch.get_num_threads() == 1
    yield from _fields_judged()


def _fields_judged() -> Iterator[tuple[str, bool]]:
    """Check that the gateway lists each field of the engine's request models; it refuses new fields until listed."""
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest

    from appliance.gateway.requests.fields import FIELDS, REFUSED

    for route, model in (
        ("chat.completions", ChatCompletionRequest),
        ("completions", CompletionRequest),
        ("responses", ResponsesRequest),
        ("messages", AnthropicMessagesRequest),
        ("messages.count_tokens", AnthropicCountTokensRequest),
        ("embeddings", EmbeddingCompletionRequest),
        ("embeddings", EmbeddingChatRequest),
    ):
        unjudged = sorted(set(model.model_fields) - set(FIELDS[route]) - set(REFUSED))
        yield f"the gateway has judged every field of {model.__name__}: {unjudged} are new", not unjudged
        counts = model is AnthropicCountTokensRequest  # counting uses no cache
        yield f"{model.__name__} takes a cache_salt", counts or "cache_salt" in model.model_fields
