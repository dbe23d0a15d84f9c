"""The front end refuses requests that would end an engine within a step; its metrics and ends of turn."""

import functools
from collections.abc import AsyncGenerator
from itertools import permutations
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from prometheus_client import CollectorRegistry, Gauge
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.worker.gpu.sample import bad_words

from appliance.models.template_trial import try_here
from serve.vllm.frontend import Frontend, Inputs, Metrics, bound_forbidden, end_turns_of
from weights.checkpoint.turns import PROBES


class Letters:
    """A tokenizer with one token per character."""

    max_token_id = 255

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


def prepared(known: int, parameters: SamplingParams) -> SamplingParams:
    """Parameters as the front end completes them: with the model's settings, then with its tokenizer."""
    parameters.update_from_generation_config({"eos_token_id": [2, 200]}, 2)
    parameters.update_from_tokenizer(Letters())
    bound_forbidden(parameters, known)
    return parameters


def test_bound_forbidden_refuses_too_many_bad_words() -> None:
    states: Any = object.__new__(bad_words.BadWordsState)  # skips __init__, which needs a GPU
    states.num_bad_words = SimpleNamespace(np=[0])
    states.bad_word_token_ids = states.bad_word_offsets = SimpleNamespace(stage_write=lambda *_: None)
    most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    fits = prepared(256, SamplingParams(bad_words=["x" * 256, "y" * (most - 256)]))
    assert states.add_request(0, fits)
    with pytest.raises(VLLMValidationError) as refused:
        prepared(256, SamplingParams(bad_words=["x" * 256, "y" * (most - 255)]))
    assert refused.value.parameter == "bad_words"
    fits._bad_words_token_ids.append([1])
    with pytest.raises(ValueError, match="Too many total bad word tokens"):
        states.add_request(0, fits)


def test_bound_forbidden_drops_tokens_outside_vocabulary() -> None:
    """vLLM's GPU kernel writes at the token's index in the row of logits without checking the row's length."""
    forbids = SamplingParams(bad_words=["ab", "a\xff", "\xff"], min_tokens=1)
    made = prepared(128, forbids)
    assert made.bad_words_token_ids == [[97, 98]] and made.all_stop_token_ids == {2}
    nothing = prepared(128, SamplingParams())
    assert nothing.bad_words_token_ids is None and nothing.all_stop_token_ids == {2}


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A factory of Inputs for a model with 128 tokens, whose requests have the given prompt."""

    def make(prompt: list[int], *, images: bool = False) -> Any:
        request = SimpleNamespace(prompt_token_ids=prompt, sampling_params=None)
        monkeypatch.setattr(InputProcessor, "process_inputs", lambda self: request)
        made = object.__new__(Inputs)
        made.model_config = SimpleNamespace(get_vocab_size=lambda: 128, is_multimodal_model=images)
        return made

    return make


def test_inputs_refuse_tokens_outside_embedding(inputs: Any) -> None:
    """vLLM's own check uses the tokenizer's vocabulary if it is larger."""
    with pytest.raises(VLLMValidationError) as refused:
        inputs([5, 128]).process_inputs()
    assert refused.value.parameter == "prompt"
    assert inputs([5, 127]).process_inputs() and inputs([5, 128], images=True).process_inputs()


@pytest.mark.parametrize("tokens", [[], [1, 2]])
async def test_generate_failed_grammar_raises_error(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    async def generate(self: Any, prompt: Any, sampling_params: Any) -> AsyncGenerator[Any, None]:
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason="error")])

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    monkeypatch.setattr(AsyncLLM, "__del__", lambda self: None)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(VLLMValidationError):
        async for _ in object.__new__(Frontend).generate("", params):
            pass


LABELS = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]


def asked_for_in_each_order(logger: MagicMock) -> None:
    for name in LABELS:
        setattr(logger, f"labelname_{name}", name)
    for names in permutations("abcd"):
        told = dict.fromkeys(names, 1)
        PrometheusStatLogger.record(
            logger, SchedulerStats(waiting_lora_adapters=told, running_lora_adapters=told), None
        )


def test_metrics_omit_series_per_adapter_order(monkeypatch):
    logger = MagicMock(max_lora=4, gauge_lora_info=Gauge("lora", "", LABELS, registry=CollectorRegistry()))
    series = logger.gauge_lora_info._metrics
    asked_for_in_each_order(logger)
    assert len(series) == 24, "series of unpatched vLLM"
    series.clear()
    monkeypatch.setattr(PrometheusStatLogger, "__init__", lambda self: vars(self).update(gauge_lora_info="vLLM's"))
    logger.gauge_lora_info = Metrics().gauge_lora_info
    asked_for_in_each_order(logger)
    assert not series and logger.gauge_scheduler_running[0].set.called


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def rendered():
    return try_here(CHATML, {})["rendered"]


class Tokenizer:
    bos_token, eos_token, eos_token_id = None, "</s>", 2

    def get_added_vocab(self):
        return {"</s>": 2, "<|im_start|>": 6, "<|im_end|>": 7}

    def apply_chat_template(self, messages, *, chat_template, tokenize, **given):
        name = next(
            n for n, p in PROBES.items() if {"add_generation_prompt": True} | p == {"messages": tuple(messages)} | given
        )
        text = rendered()[name]
        if text is None:
            raise ValueError(name)
        return text


@pytest.mark.parametrize(("fields", "ends"), [({}, [7]), ({"eos_token_id": 2}, [2, 7]), ({"eos_token_id": [7]}, [7])])
def test_end_turns_of_adds_template_end_token(fields, ends):
    llm = SimpleNamespace(get_tokenizer=Tokenizer, input_processor=SimpleNamespace(generation_config_fields=fields))
    end_turns_of(llm, CHATML)
    assert fields["eos_token_id"] == ends
