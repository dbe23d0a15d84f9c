"""Converts a chat example to rows of token ids and a loss mask, through the model's own chat template.

The model is trained on what it is to write (train.data.turns) and on nothing else: not on prompts, whatever they say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from train.data import turns
from train.data.records import BadRecord
from train.data.turns import Conversation, Render, Row, TurnForm
from train.plan.errors import UnsupportedModel
from weights.format.foreign_json import size, text_part
from weights.format.tool_template import with_tools

Tokens = tuple[np.ndarray, np.ndarray]
Result = TypeVar("Result")


def vocabulary_of(model: str | Path) -> int | None:
    """How many tokens the model in this directory has embeddings for; its tokenizer may have more. None if its
    config.json does not say."""
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
        return size(text_part(config), "vocab_size") or None
    except (OSError, ValueError, AttributeError):
        return None


class ChatEncoder:
    """Encodes chat examples (as `formats.convert` makes them) for one tokenizer, and for a model that has embeddings
    for the first `vocabulary` of its tokens; None: for all."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None):
        if not tokenizer.is_fast:
            raise UnsupportedModel(
                "the model has no fast tokenizer (tokenizer.json), which is needed to tell which tokens are whose"
            )
        self.tokenizer, self._vocabulary = tokenizer, vocabulary
        self.n_without_tools = 0  # examples whose tools the template left out
        template = tokenizer.chat_template
        # The same template that engines render requests with.
        self._template = with_tools(template) if isinstance(template, str) else None

    def encode(self, example: dict[str, Any]) -> list[Tokens]:
        """Rows of (token ids (n,) int32, trained (n,) bool), one for all trained turns or one for each where the
        template needs it (train.data.turns). Raises BadRecord if the template refuses the example or loses something of
        it, or the model does not know a token of it: on a GPU the rank would fail in words about some kernel."""
        rows = [self._tokens(row) for row in self.rows(example)]
        if any(tokens is None for tokens in rows):  # an engine's prompt would end within a token of the row
            rows = [self._tokens(row) for row in self.rows(example, apart=True)]
        return [tokens for tokens in rows if tokens is not None]

    def encode_whole(self, example: dict[str, Any]) -> Tokens:
        """The example as one row. Raises BadRecord also where the template needs one for each turn."""
        rows = self.encode(example)
        if len(rows) > 1:
            raise BadRecord(
                "has an output of several turns, and the model's chat template writes the first ones otherwise once "
                "others follow: give each output one turn of the assistant"
            )
        return rows[0]

    def encode_text(self, text: str) -> Tokens:
        """A document as one row of which every token is trained: as the tokenizer begins a text, and with its end of
        text. Raises BadRecord."""
        begin = self.tokenizer("", verbose=False)["input_ids"][:1]
        begin = [token for token in begin if token == self.tokenizer.bos_token_id]
        end = [token for token in (self.tokenizer.eos_token_id,) if token is not None]
        ids = np.array([*begin, *self._tokenise(text)["input_ids"], *end], dtype=np.int32)
        return ids, np.ones(len(ids), bool)

    def prompt(self, example: dict[str, Any]) -> np.ndarray:
        """Token ids (n,) int32 up to where the assistant is to answer. Raises BadRecord if the template refuses it."""
        tools = example.get("tools")
        text = self._in_first_form(example, lambda render, messages: turns.prompt(render, messages, tools))
        return np.array(self._tokenise(text)["input_ids"], dtype=np.int32)

    def rows(self, example: dict[str, Any], *, apart: bool = False) -> list[Row]:
        """The rendered rows of an example. Raises BadRecord."""
        tools = example.get("tools")
        rows = self._in_first_form(
            example,
            lambda render, messages: Conversation(render, messages, tools, self.form, self._stops).rows(apart=apart),
        )
        prompt = rows[0].text[: rows[0].spans[0][0]]
        if tools and not any(tool["function"]["name"] in prompt for tool in tools):
            self.n_without_tools += 1
        return rows

    @cached_property
    def form(self) -> TurnForm:
        """How the model's template begins and ends an answer."""
        return turns.turn_form(partial(self._render, self._forms[0]), self._stops, self.tokenizer.eos_token)

    @cached_property
    def _forms(self) -> tuple[_MessageForm, ...]:
        """The forms of a message to try, in this order. Raises BadRecord for a model without a chat template."""
        if not self.tokenizer.chat_template:
            raise BadRecord(
                "is a conversation, and the model's tokenizer has no chat template: add chat_template.jinja to the "
                'model\'s directory, or train on documents, {"text": ...}'
            )
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": turns.PROBE}]
        for parts in (False, True):
            forms = tuple(
                partial(_message_form, parts=parts, as_text=as_text, bare=bare, short_ids=short_ids)
                for short_ids, as_text, bare in product((False, True), repeat=3)
            )
            try:
                if turns.PROBE in self._render(forms[0], probe):
                    return forms
            except BadRecord:
                pass
        return tuple(partial(form, parts=False) for form in forms)

    def _tokens(self, row: Row) -> Tokens | None:
        """The row's tokens; None for one of several turns where a token has both prompt and answer."""
        encoded = self._tokenise(row.text)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        starts, ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        trained = np.zeros(len(ids), bool)
        for start, end in row.spans:
            if ((starts < start) & (ends > start)).any():
                if len(row.spans) > 1:
                    return None
                # Prompt and answer as an engine has them: the prompt's tokens end where the prompt does.
                prompt, answer = (self._tokenise(text)["input_ids"] for text in (row.text[:start], row.text[start:]))
                ids = np.array([*prompt, *answer], dtype=np.int32)
                return ids, np.arange(len(ids)) >= len(prompt)
            trained |= (starts >= start) & (starts < end) & (ends > starts)
        return ids, trained

    def _stops(self, text: str) -> bool:
        return any(token in text for token in self._stop_tokens)

    @cached_property
    def _stop_tokens(self) -> list[str]:
        """Tokens of their own, at any of which an engine can end an answer."""
        return [token for token in self.tokenizer.get_added_vocab() if token.strip()]

    def _in_first_form(self, example: dict[str, Any], make: Callable[[Render, list[dict[str, Any]]], Result]) -> Result:
        """The result of `make` for the example's messages, with parsed arguments of calls, in the first form of a
        message in which nothing is lost: templates differ in how they take calls. Raises BadRecord."""
        messages = [self._without_end(index, _parsed(turn)) for index, turn in enumerate(example["messages"])]
        forms = self._forms if any(message.get("tool_calls") for message in messages) else self._forms[:1]
        refusals = []
        for form in forms:
            try:
                return make(partial(self._render, form), messages)
            except BadRecord as bad:
                refusals.append(bad)
        raise refusals[0]

    def _without_end(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """The message less an end of turn after a trained answer's text, which the template writes. Raises BadRecord
        for one within the text: an engine would stop there."""
        if message["role"] != "assistant" or message.get("weight", 1) == 0:
            return message
        text = message["content"]
        while end := next((end for end in self._ends if text.rstrip().endswith(end)), None):
            text = text.rstrip().removesuffix(end)
        if end := next((end for end in self._ends if end in text), None):
            raise BadRecord(
                f"has {end!r} within messages[{index}]: there the model would learn to end its turn, and an engine to "
                "stop; remove it from the text"
            )
        return {**message, "content": text}

    @cached_property
    def _ends(self) -> list[str]:
        """The tokens that end a turn of the model."""
        ends = {token for token in self._stop_tokens if token in self.form.end}
        return sorted(ends | ({self.tokenizer.eos_token} if self.tokenizer.eos_token else set()))

    def _tokenise(self, text: str) -> Any:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        highest = max(encoded["input_ids"], default=0)
        if self._vocabulary is not None and highest >= self._vocabulary:
            raise BadRecord(
                f"has the token {self.tokenizer.convert_ids_to_tokens(highest)!r} ({highest}), which the model's "
                f"tokenizer has and the model, with {self._vocabulary} of them, does not"
            )
        return encoded

    def _render(self, form: _MessageForm, messages: Sequence[dict[str, Any]], tools: Any = None, **options: Any) -> str:
        """Raises BadRecord."""
        try:
            text = self.tokenizer.apply_chat_template(
                [form(message) for message in messages],
                tools=tools,
                chat_template=self._template,
                tokenize=False,
                **options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise BadRecord(f"is refused by the model's chat template: {error}") from error
        assert isinstance(text, str)
        return text


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as objects."""
    result = dict(message)
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in calls
        ]
    return result


def _message_form(
    message: dict[str, Any], *, parts: bool, as_text: bool, bare: bool, short_ids: bool
) -> dict[str, Any]:
    """A message as a template takes it. parts: those of vision models read content as a list of parts. as_text: most
    write a call's arguments with tojson, which would quote a text twice; DeepSeek's add them to a text. bare: some
    write calls only of a message whose content is none. short_ids: Mistral's refuse ids that are not nine letters."""
    result = {key: value for key, value in message.items() if key != "weight"}
    if parts:
        result["content"] = [{"type": "text", "text": message["content"]}]
    if thought := message.get("reasoning_content"):
        result |= {"reasoning": thought, "thinking": thought}  # gpt-oss and LFM read the last one
    if calls := message.get("tool_calls"):
        if bare and not message["content"]:
            result["content"] = None
        if as_text:
            result["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in calls
            ]
    if short_ids and "tool_calls" in result:
        result["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in result["tool_calls"]]
    if short_ids and "tool_call_id" in result:
        result["tool_call_id"] = _short_id(result["tool_call_id"])
    return result


def _short_id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:9]


_MessageForm = Callable[[dict[str, Any]], dict[str, Any]]
