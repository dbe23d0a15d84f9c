"""Presents a model of a box to lm-evaluation-harness, whose requests become batches of the OpenAI API.

No tokenizer is needed here: the tokens of a text, where each begins and its log-probability come with the answer
(`echo`), and the box's own chat template makes prompts of messages.
"""

from __future__ import annotations

import json
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from appliance.harness.batches import Batches
from appliance.harness.errors import Unsupported

MOST_STOPS = 4
"""Stop texts that a request of the OpenAI API may have. Answers are cut at all those that a task names."""


class BoxModel(LM):
    """One model or version of a box.

    chat: whether questions that want a text are sent as messages, for the model's own chat template, or as text.
    max_tokens: the most of an answer, if the task names no number.
    """

    def __init__(self, batches: Batches, name: str, *, chat: bool, max_tokens: int, seed: int | None):
        super().__init__()
        self._batches, self.name, self._chat, self._max_tokens, self._seed = batches, name, chat, max_tokens, seed

    @property
    def tokenizer_name(self) -> str:
        return self.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        return ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the messages as JSON, because the box renders them."""
        if not add_generation_prompt:
            raise Unsupported("a task that continues an answer which it has begun; ask it with --no-chat-template")
        return json.dumps(chat_history, ensure_ascii=False)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        if not requests:
            return []
        questions, stops = [], []
        for request in requests:
            text, wanted = request.args[0], dict(request.args[1])
            until = wanted.get("until") or []
            stops.append([until] if isinstance(until, str) else [one for one in until if one])
            questions.append(self._question(text, wanted, stops[-1]))
        url = "/v1/chat/completions" if self._chat else "/v1/completions"
        answers = self._batches.answers(url, questions, f"{self.name}, {requests[0].task_name}")
        return [_cut(_text(answer), until) for answer, until in zip(answers, stops, strict=True)]

    def _question(self, text: str, wanted: dict[str, Any], until: list[str]) -> dict[str, Any]:
        sampled = bool(wanted.get("do_sample"))
        tokens = int(wanted.get("max_gen_toks") or wanted.get("max_tokens") or self._max_tokens)
        body: dict[str, Any] = {"model": self.name, "temperature": wanted.get("temperature", 1.0) if sampled else 0.0}
        if sampled and "top_p" in wanted:
            body["top_p"] = wanted["top_p"]
        if until:
            body["stop"] = until[:MOST_STOPS]
        if self._seed is not None:
            body["seed"] = self._seed
        if self._chat:
            return {**body, "messages": json.loads(text), "max_completion_tokens": tokens}
        return {**body, "prompt": text, "max_tokens": tokens}

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns for each continuation after its context the sum of its tokens' log-probabilities (natural logarithm),
        and whether each token was the likeliest. As in the library, blanks at the end of a context belong to the
        continuation, and so does a token that begins in the context and ends in the continuation."""
        if not requests:
            return []
        questions, begins = [], []
        for request in requests:
            context, continuation = request.args
            if not context.strip():
                raise Unsupported(f"{request.task_name} scores texts that follow nothing, which no completion tells")
            begins.append(len(context.rstrip()))
            body = {"model": self.name, "prompt": context + continuation, "max_tokens": 0, "echo": True, "logprobs": 1}
            questions.append({**body, "temperature": 0.0})
        answers = self._batches.answers("/v1/completions", questions, f"{self.name}, {requests[0].task_name}")
        return [_score(answer["choices"][0], begin) for answer, begin in zip(answers, begins, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise Unsupported(f"{requests[0].task_name} measures perplexity of whole texts, which is not supported")


def _text(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str((choice["message"]["content"] if "message" in choice else choice["text"]) or "")


def _cut(text: str, until: list[str]) -> str:
    for stop in until:
        text = text.split(stop)[0]
    return text


def _score(choice: dict[str, Any], begin: int) -> tuple[float, bool]:
    """begin: characters of the text before the continuation."""
    logprobs = choice["logprobs"]
    total, greedy = 0.0, True
    for token, offset, logprob, likeliest in zip(
        logprobs["tokens"], logprobs["text_offset"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        if offset + len(token) <= begin or logprob is None:
            continue
        total += logprob
        greedy = greedy and logprob >= max((likeliest or {token: logprob}).values())
    return total, greedy
