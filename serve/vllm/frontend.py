"""The front end's engine client: vLLM's AsyncLLM, which also checks for requests that would end the engine.

Token ids beyond the model's vocabulary: a tokenizer may have tokens that have no row in the model, such as image
placeholders, and vLLM checks ids against the larger of the two vocabularies. Too many `bad_words`: the GPU runner has
rows of fixed length and raises if the words exceed a row. Either request would end the engine and all its requests.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.loggers import PrometheusStatLogger

from serve.vllm import answers, grammars
from weights.checkpoint.turns import PROBES, new_end
from weights.format.tool_template import with_tools

log = logging.getLogger(__name__)

UNFOLLOWED = (
    "No answer can satisfy the requested format (`response_format`, `structured_outputs`, `text.format`, "
    "`output_config` or tools): it allows no value, refers to itself without an object or list in between, or takes "
    "too long to check. Simplify it: use fewer alternatives, repeats and patterns."
)


class Frontend(AsyncLLM):
    """The engine client that the serving process builds instead of an AsyncLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input_processor = Inputs(self.vllm_config, self.renderer)

    async def add_request(self, *args: Any, **kwargs: Any) -> RequestOutputCollector:
        try:
            collector = await super().add_request(*args, **kwargs)
        except Exception as error:
            raise answers.fault_of(error) from error
        answers.begin()
        return collector

    async def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Generate; answer 400 instead of vLLM's 500 if the grammar ended the request (vllm#18783)."""
        async with aclosing(super().generate(prompt, sampling_params, *args, **kwargs)) as outputs:
            async for output in outputs:
                if sampling_params.structured_outputs is not None:
                    if any(completion.finish_reason == "error" for completion in output.outputs):
                        raise VLLMValidationError(UNFOLLOWED)
                yield output


class Inputs(InputProcessor):
    """Builds and checks the core's requests."""

    def process_inputs(self, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        request = super().process_inputs(*args, **kwargs)
        known = self.model_config.get_vocab_size()
        ids = request.prompt_token_ids
        # Models that read images replace such tokens by image embeddings.
        if ids and max(ids) >= known and not self.model_config.is_multimodal_model:
            raise VLLMValidationError(
                f"The prompt contains token {max(ids)}, which the tokenizer has but the model does not.",
                parameter="prompt",
            )
        if (params := request.sampling_params) is not None:
            bound_forbidden(params, known)
        return request

    def _validate_params(self, params: Any, supported_tasks: Any) -> bool | None:
        if not isinstance(params, SamplingParams):
            return super()._validate_params(params, supported_tasks)
        reasoning = self.vllm_config.reasoning_config
        if reasoning is None or not reasoning.enabled:
            params.thinking_token_budget = None  # clients set this field for all models
        with grammars.prepared(params):
            return super()._validate_params(params, supported_tasks)


def bound_forbidden(params: SamplingParams, known: int) -> None:
    """Drop forbidden tokens that the model lacks: for these a kernel would write into the next request's row. known:
    size of the model's vocabulary. Raises VLLMValidationError for too many bad words."""
    words = params.bad_words_token_ids or []
    if sum(map(len, words)) > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS:
        message = f"The bad_words have more than {envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS} tokens together."
        raise VLLMValidationError(message, parameter="bad_words")
    if words:
        params._bad_words_token_ids = [ids for ids in words if max(ids) < known]
    params._all_stop_token_ids = {token for token in params.all_stop_token_ids if token < known}


def end_turns_of(llm: Any, template: str) -> None:
    """Let later requests also end at the token that ends a turn in `template`, the model's setting. If the model keeps
    its checkpoint's own template, the import has added that token to generation_config.json."""
    tokenizer: Any = llm.get_tokenizer()
    fields = llm.input_processor.generation_config_fields
    ids = fields.get("eos_token_id")
    ids = [ids] if isinstance(ids, int) else list(ids or ())
    added = tokenizer.get_added_vocab()
    known = {token for token, number in added.items() if number in (*ids, tokenizer.eos_token_id)}
    rendered = {name: _rendered(tokenizer, str(with_tools(template)), probe) for name, probe in PROBES.items()}
    begins = {tokenizer.bos_token} - {tokenizer.eos_token}
    end = new_end(rendered, added.keys() - begins, known)
    fields["eos_token_id"] = [*ids, *([added[end]] if end else [])]


def _rendered(tokenizer: Any, template: str, probe: dict[str, Any]) -> str | None:
    options = {"add_generation_prompt": True} | probe
    messages = options.pop("messages")
    try:
        return tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **options)
    except Exception as error:  # noqa: BLE001 - a template raises whatever it likes, and a request hears of it
        log.debug("the chat template refuses a conversation: %s", error)
        return None


class Metrics(PrometheusStatLogger):
    """vLLM's metrics without the series for each order of requested adapters: 20 adapters of one owner gave 93,000
    series, which took 112 MiB and blocked the event loop for 2.6 s per scrape."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.gauge_lora_info = None
