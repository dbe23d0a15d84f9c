"""Converts a chat example to token ids and a loss mask, through the model's own chat template.

The model learns the assistant's messages and the token that ends its turn, never the prompts. If the template marks
them with {% generation %}, the marks decide. Otherwise the encoder renders the example up to each assistant message,
with and without it, and the difference is the span (the method of OpenAI's and Axolotl's trainers).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import orjson
from transformers import PreTrainedTokenizerBase

from train.data.formats import BadRecord
from train.plan.errors import UnsupportedModel
from weights.format.tool_template import with_tools

# Without marks each answer is found in what the template writes of all that comes before it: for 8192 messages,
# 0.4 MB, that took three minutes. A message takes 5 us each time, and so do 1,000 bytes of text, 250 of calls (as JSON)
# and 50 of tools (as JSON that is indented, in Python): these many are 10 s of a processor.
MOST_RENDERED = 1 << 21
_MOST_NAMES_BYTES = 1 << 31  # of functions that are called, each found in the whole text: a second or two
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def vocabulary_of(model: str | Path) -> int | None:
    """How many tokens the model in this directory has embeddings for; its tokenizer may have more. None if its
    config.json does not say."""
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
        found = config.get("text_config", config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


class ChatEncoder:
    """Encodes chat examples (as `formats.to_chat` makes them) for one tokenizer, and for a model that has embeddings
    for the first `vocabulary` of its tokens; None: for all."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None):
        template = tokenizer.chat_template
        if not template:
            raise UnsupportedModel(
                "the model's tokenizer has no chat template, so it is not known how a conversation looks to it; "
                "add chat_template.jinja to the model directory"
            )
        if not tokenizer.is_fast:
            raise UnsupportedModel(
                "the model has no fast tokenizer (tokenizer.json), which is needed to tell which tokens are whose"
            )
        self.tokenizer, self._vocabulary = tokenizer, vocabulary
        # The same that engines render requests with: a call that a template left out would be learnt from silently.
        self._template = with_tools(template) if isinstance(template, str) else None
        self._marks = _GENERATION.search(str(template)) is not None

    def encode(self, example: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """(token ids (n,) int32, learnt (n,) bool). Raises BadRecord if the template refuses the example, or the model
        does not know a token of it: on a GPU the rank would fail in words about some kernel."""
        text, spans = self.spans(example)
        encoded = self._tokenise(text)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        ends = np.array([end for _, end in encoded["offset_mapping"]], dtype=np.int64)
        within = np.zeros(len(text) + 1, bool)
        for start, end in spans:
            within[start:end] = True
        # A token that begins before a span contains prompt text, and is not learnt.
        return np.array(encoded["input_ids"], dtype=np.int32), within[starts] & (ends > starts)

    def prompt(self, example: dict[str, Any]) -> np.ndarray:
        """Token ids (n,) int32 up to where the assistant is to answer. Raises BadRecord if the template refuses it."""
        messages = [_for_template(message) for message in example["messages"]]
        text = self._render(messages, example.get("tools"), add_generation_prompt=True)
        _refuse_lost_calls(messages, text)
        return np.array(self._tokenise(text)["input_ids"], dtype=np.int32)

    def spans(self, example: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text, and the (start, end) characters in it that are learnt."""
        messages = [_for_template(message) for message in example["messages"]]
        tools = example.get("tools")
        text = self._render(messages, tools)
        _refuse_lost_calls(messages, text)
        _refuse_lost_reasoning(messages, text)
        if self._marks:
            return text, self._marked_spans(example["messages"], messages, tools, text)
        refuse_costly(example)
        spans, cursor = [], 0
        for index, message in enumerate(example["messages"]):
            if message["role"] != "assistant":
                continue
            start, end = self._span(text, messages, index, tools, cursor)
            cursor = end
            if message.get("weight", 1) != 0:
                spans.append((start, end))
        return text, spans

    def _span(self, text: str, messages: list[dict], index: int, tools: Any, cursor: int) -> tuple[int, int]:
        last = index == len(messages) - 1
        before = self._try_render(messages[:index], tools, add_generation_prompt=True) if index else None
        through = text if last else self._try_render(messages[: index + 1], tools)
        aligned = before and through and text.startswith(before) and text.startswith(through)
        if aligned and len(before) < len(through):
            start, end = len(before), len(through)
        else:
            # The template renders a message differently once others follow (drops reasoning, moves tools), so the
            # prefixes do not line up. The text still contains what the assistant said.
            content = messages[index]["content"].strip()
            start = text.find(content, cursor) if content else -1
            if start < 0:
                raise BadRecord(f"the chat template hides messages[{index}], so it cannot be learnt from")
            end = start + len(content)
        return start, self._turn_end(text, start, end)

    def _turn_end(self, text: str, start: int, end: int) -> int:
        # Learn the end-of-turn token, but not the newline that some templates put after it: no engine ever samples
        # that.
        stop = self.tokenizer.eos_token
        if not stop:
            return end
        inside = text.rfind(stop, start, end)
        if inside >= 0 and not text[inside + len(stop) : end].strip():
            return inside + len(stop)
        return end + len(stop) if text.startswith(stop, end) else end

    def _marked_spans(self, given: list[dict], messages: list[dict], tools: Any, text: str) -> list[tuple[int, int]]:
        marked = self._call(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        offsets = self._tokenise(text)["offset_mapping"]
        mask = marked["assistant_masks"]
        if len(mask) != len(offsets):
            raise UnsupportedModel("the chat template's {% generation %} mask does not match its text")
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        spans = [(offsets[a][0], offsets[b - 1][1]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        answers = [message for message in given if message["role"] == "assistant"]
        if any(message.get("weight", 1) == 0 for message in answers):
            if len(spans) != len(answers):
                marks = "the chat template's {% generation %} marks do not tell its assistant messages apart"
                raise BadRecord(f"uses message weights, but {marks}")
            spans = [span for span, message in zip(spans, answers, strict=True) if message.get("weight", 1) != 0]
        return spans

    def _tokenise(self, text: str) -> Any:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        highest = max(encoded["input_ids"], default=0)
        if self._vocabulary is not None and highest >= self._vocabulary:
            raise BadRecord(
                f"has the token {self.tokenizer.convert_ids_to_tokens(highest)!r} ({highest}), which the model's "
                f"tokenizer has and the model, with {self._vocabulary} of them, does not"
            )
        return encoded

    def _try_render(self, messages: list[dict], tools: Any, **options: Any) -> str | None:
        try:
            return self._render(messages, tools, **options)
        except BadRecord:  # templates may insist on whole conversations
            return None

    def _render(self, messages: list[dict], tools: Any, **options: Any) -> str:
        return self._call(messages, tools, tokenize=False, **options)

    def _call(self, messages: list[dict], tools: Any, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, chat_template=self._template, **options)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise BadRecord(f"is refused by the model's chat template: {error}") from error


def refuse_costly(example: dict[str, Any]) -> None:
    """Raises BadRecord for an example in which to find the answers without marks takes more than some seconds."""
    messages = example["messages"]
    answers = sum(message["role"] == "assistant" for message in messages)
    if answers <= 1:
        return
    size, tools = len(orjson.dumps(example)), len(orjson.dumps(example.get("tools")))
    calls = len(orjson.dumps([message.get("tool_calls") for message in messages]))
    if answers * (len(messages) + (size + 3 * calls + 19 * tools) / 1000) > MOST_RENDERED:
        raise BadRecord(
            f"has {answers} answers among {len(messages)} messages, in {size} bytes with its tools: to find them takes "
            "too long with the model's chat template, which does not mark them; make several examples of it"
        )


def _refuse_lost_calls(messages: list[dict[str, Any]], text: str) -> None:
    called: dict[str, int] = {}
    for number, message in enumerate(messages, 1):
        for call in message.get("tool_calls") or ():
            called.setdefault(str(call["function"]["name"]), number)
    if len(called) > 32 and len(called) * len(text) > _MOST_NAMES_BYTES:
        raise BadRecord(f"calls {len(called)} functions in {len(text)} characters: make several examples of it")
    for name, number in called.items():
        if name not in text:
            raise BadRecord(
                f"calls {name!r} in message {number}, which the model's chat template does not "
                "write: nothing of the call would be learnt; give the model a chat template with tool calls"
            )


def _refuse_lost_reasoning(messages: list[dict[str, Any]], text: str) -> None:
    """Looks at the last message alone: templates of reasoning models leave out what was thought before earlier
    answers."""
    thought = messages[-1].get("reasoning_content", "").strip()
    if thought and thought not in text:
        raise BadRecord(
            f"has reasoning in message {len(messages)}, which the model's chat template does not write: nothing of it "
            "would be learnt; leave it away, or give the model a chat template with reasoning"
        )


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in message.items() if key != "weight"}
    if calls := message.get("tool_calls"):
        # Templates write arguments with tojson, which would quote a string twice.
        result["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in calls
        ]
    return result
