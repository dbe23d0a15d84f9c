"""What serve relies on inside vLLM, checked in a process forked from the warm parent (importing vLLM takes 12 s)."""

from __future__ import annotations

import inspect
from typing import Any

from runtime.devices import kinds
from runtime.processes.lifeline import Lifeline


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """Reports `{"event": "contract", "failures": [...]}`."""
    lifeline.emit("contract", failures=[text for text, holds in _claims() if not holds])
    return 0


def _claims():
    import threading
    from dataclasses import fields

    import torch
    from vllm.config import ModelConfig
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.generate.base import serving as base_serving
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _RegisteredModel
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core
    from vllm.v1.engine import utils as engine_utils
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.worker.cpu_worker import CPUWorker

    from serve.engine import main as engine
    from serve.engine import preload
    from serve.vllm import plugin

    def has(owner: object, *names: str):
        return [(f"{getattr(owner, '__name__', owner)} has {name}", hasattr(owner, name)) for name in names]

    yield from has(multiproc_executor.MultiprocExecutor, "_ensure_worker_termination", "collective_rpc")
    yield (
        "failures of a core and its workers are logged in these words",
        all(
            words in inspect.getsource(module)
            for module, words in (
                (core, 'logger.exception("EngineCore failed to start.")'),
                (core, 'logger.exception("EngineCore encountered a fatal error.")'),
                (multiproc_executor, 'logger.exception("WorkerProc failed to start.")'),
            )
        ),
    )
    yield (
        "a front end that waits for its core has it in this variable",
        "launch.engine_manager.finished_procs()" in inspect.getsource(engine_utils.wait_for_engine_startup),
    )
    yield from has(InputProcessor, "process_inputs", "_validate_params")
    yield from has(EngineCore, "wake_up", "pause_scheduler", "resume_scheduler")
    yield from has(CPUWorker, "init_device", "sleep", "wake_up")
    yield from has(_LazyRegisteredModel, "load_model_cls")
    yield from has(_RegisteredModel, "from_model_cls")
    yield from has(
        AsyncLLM,
        "add_request",
        "is_paused",
        "resume_generation",
        "collective_rpc",
        "sleep",
        "wake_up",
        "errored",
    )
    yield "pause 'keep' exists", "keep" in inspect.getsource(EngineCore.pause_scheduler)
    pause = inspect.getsource(AsyncLLM.pause_generation)
    yield "pause_generation still sleeps 20 ms of its own", "sleep(0.02)" in pause
    yield "a full wake resumes by itself", "resume_scheduler()" in inspect.getsource(EngineCore.wake_up)
    yield from has(Scheduler, "has_unfinished_requests")
    yield from has(EngineCore, "add_lora", "remove_lora")
    yield (
        "what a resolver of adapters finds is loaded at once by the engine's own method",
        "await resolver.resolve_lora(base_model_name, lora_name)"
        in (found := inspect.getsource(OpenAIServingModels.resolve_lora))
        and "lora_request.lora_int_id = unique_id" in found
        and "await self.engine_client.add_lora(lora_request)" in found,
    )
    yield "a request's priority comes in a header", base_serving.PRIORITY_HEADER.lower() == "x-vllm-priority"
    for route in (OpenAIServingChat, OpenAIServingCompletion, OpenAIServingResponses):
        yield f"{route.__name__} reads it", "self._get_priority(request, raw_request)" in inspect.getsource(route)
    yield "messages too", "create_chat_completion(chat_req, raw_request)" in inspect.getsource(AnthropicServingMessages)
    yield (
        "block hashes start from cache_salt",
        "request.cache_salt" in inspect.getsource(kv_cache_utils.generate_block_hash_extra_keys),
    )
    yield (
        "an answer reads its fingerprint when it ends",
        "self.system_fingerprint" in inspect.getsource(OpenAIServingCompletion),
    )
    yield "the scheduler knows its pause state", "pause_state" in inspect.getsource(Scheduler)
    yield (
        "the registry shares the list of served names",
        "base_model_paths=base_model_paths" in inspect.getsource(OpenAIServingModels.__init__),
    )
    plugin.register()
    plugin.register()
    from vllm.config.load import LoadConfig

    yield (
        "load format shm is registered",
        type(get_model_loader(LoadConfig(load_format="shm"))).__name__ == ("ShmModelLoader"),
    )
    gpus = [kind for kind in kinds.KINDS.values() if not kind.on_host]
    yield "the warm parent built the parser", engine.PARSER.prog is not None and preload.IMPORTED > 20
    yield (
        "the preload of GPUs leaves vLLM's stand-ins for streams and events alone",
        not any(
            name.startswith(("serve.vllm.cpu_worker", "vllm.v1.worker.cpu"))
            for kind in gpus
            for name in preload.names(kind)
        ),
    )
    described = {field.name for field in fields(ModelConfig)}
    yield (
        "the hash of compiled graphs is of the model's path too",
        "model" in described and ('"model"' not in inspect.getsource(ModelConfig.compute_hash)),
    )
    yield "no thread was inherited but main and lifeline", threading.active_count() <= 2
    yield "CUDA was not initialised in the warm parent", not torch.cuda.is_initialized()
    yield from _fields_judged()
    yield from _steps_bounded(has)
    yield from _forms_followed()
    yield "one OpenMP thread", torch.get_num_threads() == 1


def _steps_bounded(has: Any):
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for grammar in (XgrammarGrammar, GuidanceGrammar):
        yield from has(grammar, "accept_tokens")
        yield from has(grammar, "fill_bitmask")
    yield (
        "a tag is compiled from its text",
        "self.compiler.compile_structural_tag(grammar_spec)" in inspect.getsource(XgrammarBackend.compile_grammar),
    )
    source = inspect.getsource(inspect.unwrap(GPUModelRunner._get_prompt_logprobs_dict))
    yield (
        "log-probabilities of a prompt are computed from where it stands in the batch, for as many tokens as are said",
        all(
            words in source
            for words in (
                "offset = self.query_start_loc.np[req_idx].item()",
                "hidden_states[offset : offset + num_logits]",
                "start_idx = request.num_computed_tokens",
                "num_tokens = num_scheduled_tokens.get(req_id)",
            )
        ),
    )
    yield (
        "a token is accepted by this method",
        "grammar.accept_tokens(" in inspect.getsource(StructuredOutputManager.accept_tokens),
    )
    yield (
        "a request whose token its grammar does not accept ends with an error",
        "self.structured_output_manager.accept_tokens(" in inspect.getsource(Scheduler.update_from_output)
        and "RequestStatus.FINISHED_ERROR" in inspect.getsource(Scheduler.update_from_output),
    )


def _forms_followed():
    """What serve.vllm.grammars replaces is called by these names."""
    from vllm.parser import abstract_parser
    from vllm.sampling_params import SamplingParams
    from vllm.v1.structured_output import StructuredOutputManager

    check = inspect.getsource(SamplingParams._validate_structured_outputs)
    yield "a form is checked by a function of llguidance's backend", "validate_guidance_grammar(" in check
    made = inspect.getsource(StructuredOutputManager.grammar_init)
    yield "the backend is made by this name", "self.backend = GuidanceBackend(" in made
    yield (
        "grammars are compiled beside the engine's steps",
        "self.executor.submit(self._create_grammar, request)"
        in inspect.getsource(StructuredOutputManager.grammar_init),
    )
    beside = inspect.getsource(abstract_parser.DelegatingParser._apply_structural_tag)
    yield "a form beside strict tools is judged by this function", "_xgrammar_supports(structured_outputs)" in beside


def _fields_judged():
    """Each field of the engine's request models is accepted, bounded or refused by the gateway: a new one is refused
    until somebody has judged it, and this says so."""
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
        counts = model is AnthropicCountTokensRequest  # it leaves nothing in a cache
        yield f"{model.__name__} takes a cache_salt", counts or "cache_salt" in model.model_fields
