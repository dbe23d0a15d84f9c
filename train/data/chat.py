"""Converts a chat example to rows of token ids and a loss mask, through the model's own chat template. Only
the model's own turns are trained, never a prompt.

An engine gets the conversation up to a turn and the template's generation prompt. The model writes the rest of that
turn, up to the end of turn at which the engine stops. So a trained turn is `prompt + completion`, and the prompt is
exactly the text that an engine sees. Turns share one row where the text of the whole conversation contains them. Where
a template writes earlier turns differently from the last one (Qwen 3 drops their thoughts, gpt-oss ends them with
another token), each such turn gets its own row.
"""

from __future__ import annotations

import hashlib
import json
import os.path
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from train.data.records import BadRecord
from train.plan.errors import UnsupportedModel
from weights.format.foreign_json import size, text_part
from weights.format.tool_template import with_tools

Tokens = tuple[np.ndarray, np.ndarray]
Result = TypeVar("Result")
Messages = Sequence[dict[str, Any]]
Render = Callable[..., str]
"""(messages, tools=None, add_generation_prompt=False) to text. Raises BadRecord for what the template refuses."""
_MessageForm = Callable[[dict[str, Any]], dict[str, Any]]

PROBE = "Zq7xV"  # a placeholder for an answer; no template contains this text
_MARKER = re.compile(r"\s*(<[^\s<>]+>)")
_THOUGHT_TAGS = re.compile(r"</?think>")
_THOUGHT_END = re.compile(r"</[^<>\s]*think[^<>\s]*>|\[/THINK\]|<\|END_THINKING\|>")
_THOUGHT_CLOSED = re.compile(rf"(?:{_THOUGHT_END.pattern})\s{{0,4}}\Z")
_TOOL = {"type": "function", "function": {"name": "a", "description": "b", "parameters": {"type": "object"}}}


class Row(NamedTuple):
    """text: the text to tokenise. spans: the trained (start, end) characters of `text`; text[:start] is the prompt."""

    text: str
    spans: tuple[tuple[int, int], ...]


def vocabulary_of(model: str | Path) -> int | None:
    """Return the number of tokens for which the model in this directory has embeddings; its tokenizer may have more
    tokens. None if config.json has no such number."""
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
        return size(text_part(config), "vocab_size") or None
    except (OSError, ValueError, AttributeError):
        return None


class ChatEncoder:
    """Encodes chat examples (from `formats.convert`) for one tokenizer. vocabulary: the number of tokens with an
    embedding in the model; None: every token has one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None):
        if not tokenizer.is_fast:
            raise UnsupportedModel(
                "the model has no fast tokenizer (tokenizer.json), which is needed to find the text of each token"
            )
        self.tokenizer, self._vocabulary = tokenizer, vocabulary
        self.n_without_tools = 0  # number of examples whose tools the template did not render
        template = tokenizer.chat_template
        # The same template that engines render requests with.
        self._template = with_tools(template) if isinstance(template, str) else None

    def encode(self, example: dict[str, Any]) -> list[Tokens]:
        """Return rows of (token ids (n,) int32, trained (n,) bool): one row for all trained turns, or one per turn
        where the template needs that. Raises BadRecord if the template refuses the example or drops a part of it, or if
        a token has no embedding in the model: on a GPU a kernel of the rank would fail."""
        return [tokens for row in self.rows(example) for tokens in self._tokens(row)]

    def encode_whole(self, example: dict[str, Any]) -> Tokens:
        """The example as one row. Raises BadRecord as `encode` does, and if the template needs several rows."""
        rows = self.encode(example)
        if len(rows) > 1:
            raise BadRecord(
                "has an output of several turns, and the model's chat template changes earlier turns when others "
                "follow: give each output one turn of the assistant"
            )
        return rows[0]

    def encode_text(self, text: str) -> Tokens:
        """Return a document as one row between begin and end tokens, with all tokens trained. Raises BadRecord."""
        begin = self.tokenizer("", verbose=False)["input_ids"][:1]
        begin = [token for token in begin if token == self.tokenizer.bos_token_id]
        end = [token for token in (self.tokenizer.eos_token_id,) if token is not None]
        ids = np.array([*begin, *self._tokenise(text)["input_ids"], *end], dtype=np.int32)
        return ids, np.ones(len(ids), bool)

    def prompt(self, example: dict[str, Any]) -> np.ndarray:
        """Token ids (n,) int32 up to the assistant's answer. Raises BadRecord if the template refuses the example."""

        def text_of(render: Render, messages: Messages) -> str:
            text = render(messages, add_generation_prompt=True)
            bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
            if bare != messages and _try(render, bare, add_generation_prompt=True) == text:
                raise BadRecord("has calls, which the model's chat template does not render")
            return text

        return np.array(self._tokenise(self._in_first_form(example, text_of))["input_ids"], dtype=np.int32)

    def rows(self, example: dict[str, Any]) -> list[Row]:
        """The rendered rows of an example. Raises BadRecord."""
        rows = self._in_first_form(
            example, lambda render, messages: Conversation(render, messages, self.form, self._stops).rows()
        )
        tools = example.get("tools")
        prompt = rows[0].text[: rows[0].spans[0][0]]
        if tools and not any(tool["function"]["name"] in prompt for tool in tools):
            self.n_without_tools += 1
        return rows

    @cached_property
    def form(self) -> TurnForm:
        """Return how the model's template begins and ends an answer."""
        return turn_form(partial(self._render, self._forms[0]), self._stops, self.tokenizer.eos_token)

    @cached_property
    def _forms(self) -> tuple[_MessageForm, ...]:
        """Message forms, in the order to try them. Raises BadRecord for a model without a chat template."""
        if not self.tokenizer.chat_template:
            raise BadRecord(
                "is a conversation, and the model's tokenizer has no chat template: add chat_template.jinja to the "
                'model\'s directory, or train on documents, {"text": ...}'
            )
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
        for parts in (False, True):
            forms = tuple(
                partial(_message_form, parts=parts, as_text=as_text, bare=bare, short_ids=short_ids)
                for short_ids, as_text, bare in product((False, True), repeat=3)
            )
            try:
                if PROBE in self._render(forms[0], probe):
                    return forms
            except BadRecord:
                pass
        return tuple(partial(form, parts=False) for form in forms)

    def _tokens(self, row: Row) -> list[Tokens]:
        """Return the tokens of `row`; one row per turn if a token spans the end of a prompt and the start of its
        answer: an engine's prompt ends within that token, but later prompts contain the whole token."""
        encoded = self._tokenise(row.text)
        ids = np.array(encoded["input_ids"], np.int32)
        starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        trained = np.zeros(len(ids), bool)
        for start, end in row.spans:
            if ((starts < start) & (ends > start)).any():
                if len(row.spans) > 1:
                    turns = (Row(row.text[:end], ((start, end),)) for start, end in row.spans)
                    return [tokens for turn in turns for tokens in self._tokens(turn)]
                prompt, answer = (self._tokenise(text)["input_ids"] for text in (row.text[:start], row.text[start:]))
                ids = np.array([*prompt, *answer], np.int32)
                return [(ids, np.arange(len(ids)) >= len(prompt))]
            trained |= (starts >= start) & (starts < end) & (ends > starts)
        return [(ids, trained)]

    def _stops(self, text: str) -> bool:
        return any(token in text for token in self._stop_tokens)

    @cached_property
    def _stop_tokens(self) -> list[str]:
        """Return the added tokens; an engine can end an answer at any of these."""
        return [token for token in self.tokenizer.get_added_vocab() if token.strip()]

    def _in_first_form(self, example: dict[str, Any], make: Callable[[Render, list[dict[str, Any]]], Result]) -> Result:
        """Return the result of `make` for the messages in the first form that the template renders completely:
        templates expect calls in different forms. Raises BadRecord."""
        messages = [self._without_end(index, turn) for index, turn in enumerate(example["messages"])]
        forms = self._forms if any(message.get("tool_calls") for message in messages) else self._forms[:1]
        refusals = []
        for form in forms:
            try:
                return make(partial(self._render, form, tools=example.get("tools")), messages)
            except BadRecord as bad:
                refusals.append(bad)
        raise refusals[0]

    def _without_end(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message without an end-of-turn token after a trained answer, because the template adds one. Raises
        BadRecord for an end-of-turn token within the text, where an engine would stop."""
        if message["role"] != "assistant" or message.get("weight", 1) == 0:
            return message
        text = message["content"]
        while end := next((end for end in self._ends if text.rstrip().endswith(end)), None):
            text = text.rstrip().removesuffix(end)
        if end := next((end for end in self._ends if end in text), None):
            raise BadRecord(
                f"has {end!r} within messages[{index}]: the model would learn to end its turn there, and engines would "
                "stop; remove it from the text"
            )
        return {**message, "content": text}

    @cached_property
    def _ends(self) -> list[str]:
        """Return the tokens that end the model's turn."""
        ends = {token for token in self._stop_tokens if token in self.form.end}
        return sorted(ends | ({self.tokenizer.eos_token} if self.tokenizer.eos_token else set()))

    def _tokenise(self, text: str) -> Any:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        highest = max(encoded["input_ids"], default=0)
        if self._vocabulary is not None and highest >= self._vocabulary:
            raise BadRecord(
                f"has the token {self.tokenizer.convert_ids_to_tokens(highest)!r} ({highest}) of the model's "
                f"tokenizer, and the model has embeddings for the first {self._vocabulary} tokens only; remove it"
            )
        return encoded

    def _render(self, form: _MessageForm, messages: Sequence[dict[str, Any]], tools: Any = None, **options: Any) -> str:
        """Render messages with the chat template. Raises BadRecord."""
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


def _message_form(
    message: dict[str, Any], *, parts: bool, as_text: bool, bare: bool, short_ids: bool
) -> dict[str, Any]:
    """A message form that some templates need.

    parts: content as a list of parts, for vision models. as_text: a call's arguments as text, for DeepSeek's template,
    which concatenates; most templates apply tojson, which would quote text twice. bare: null as the content of a
    message that has only calls. short_ids: call ids of nine letters, for Mistral."""
    result = {key: value for key, value in message.items() if key != "weight"}
    short = (lambda text: hashlib.sha256(text.encode()).hexdigest()[:9]) if short_ids else str
    if parts:
        result["content"] = [{"type": "text", "text": message["content"]}]
    if thought := message.get("reasoning_content"):
        result |= {"reasoning": thought, "thinking": thought}  # gpt-oss and LFM read "thinking"
    if calls := message.get("tool_calls"):
        if bare and not message["content"]:
            result["content"] = None
        read = str if as_text else json.loads
        result["tool_calls"] = [
            {**call, "id": short(call["id"]), "function": {**function, "arguments": read(function["arguments"])}}
            for call in calls
            for function in [call["function"]]
        ]
    if "tool_call_id" in result:
        result["tool_call_id"] = short(result["tool_call_id"])
    return result


# -- turns ------------------------------------------------------------------------------------------------------------


class TurnForm(NamedTuple):
    """How a template begins and ends an answer.

    header: the text before an answer; cut from the answer if the generation prompt lacks it. tail: the text after the
    last answer. blank: the white space after the tail. end: the text that is trained in place of the tail: the tail's
    first token that ends an answer or, without a tail, the next turn's marker (GLM's "<|user|>"). eos: the tokenizer's
    end of text, at which every engine stops.
    """

    header: str
    tail: str
    blank: str
    end: str
    eos: str = ""


def turn_form(render: Render, stops: Callable[[str], bool], eos: str | None) -> TurnForm:
    """Return how the template behind `render` begins and ends an answer. stops: whether an engine can stop at a token
    of a text. eos: the tokenizer's end of text, added if no engine could stop at the template's end."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}
    system = {"role": "system", "content": "b"}
    # Some templates require a system prompt, or tools.
    for start, tools in (([user], None), ([system, user], None), ([system, user], [_TOOL])):
        if (text := _try(render, [*start, answer], tools=tools)) is not None:
            break
    if text is None or PROBE not in text:
        return TurnForm("", "", "", eos or "", eos or "")
    before, _, tail = text.rpartition(PROBE)
    question = _try(render, start, tools=tools)
    header = before[len(question) :] if question is not None and before.startswith(question) else ""
    followed = _try(render, [*start, answer, {"role": "user", "content": "c"}], tools=tools) or text
    within = followed.rpartition(PROBE)[2]
    tail, blank = tail.rstrip(), tail[len(tail.rstrip()) :]
    end, marker = tail, re.match(r"\s*(?:<[^\s<>]+>|\S+)", tail)
    if not within.startswith(tail) and marker and stops(marker[0]):
        end = marker[0]  # the rest of the tail, like Phi 3's <|endoftext|>, follows the last turn only
    if not tail and (marker := _MARKER.match(within)):
        end = marker[1]
    end = _to_first(eos, end) if stops(end) else end + (eos or "")
    return TurnForm(header if header.strip() else "", tail, blank, end, eos or "")


def _to_first(eos: str | None, text: str) -> str:
    """Return the text up to the first end-of-text token, at which every engine stops."""
    return text[: text.index(eos) + len(eos)] if eos and eos in text else text


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages rendered with one template. render: renders messages with the example's tools. stops: as in
    `turn_form`."""

    render: Render
    messages: Messages
    form: TurnForm
    stops: Callable[[str], bool]

    def rows(self) -> list[Row]:
        """Return one row for all trained turns that the whole conversation's text contains, and one row for each other
        turn. Raises BadRecord where the template drops a part of a trained turn."""
        messages, whole = self.messages, self.render(self.messages)
        spans: list[tuple[int, int]] = []
        checked = 0
        single: list[Row] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight", 1) == 0:
                continue
            prompt, completion = self._turn(index)
            for number in range(checked, index):
                role, text = messages[number]["role"], (messages[number].get("content") or "").strip()
                if role in ("system", "user") and not any(form in prompt for form in _spellings(text)):
                    raise BadRecord(_not_rendered(f"the text of messages[{number}], from {role!r},"))
            checked = index
            if index == len(messages) - 1 and whole.startswith(prompt):
                whole = prompt + completion  # some templates write the end of turn only with the next message
            end = _end_of_turn(whole, prompt, completion, message)
            if end is None:
                single.append(Row(prompt + completion, ((len(prompt), len(prompt) + len(completion)),)))
            else:
                spans.append((len(prompt), end))
        return single + ([Row(whole[: spans[-1][1]], tuple(spans))] if spans else [])

    def _turn(self, index: int) -> tuple[str, str]:
        """Prompt and completion of the assistant's turn `messages[index]`. Raises BadRecord."""
        before, message = self.messages[:index], self.messages[index]
        thinks = any(kind == "reasoning" for kind, _ in _texts(message))
        rendered = self.render(self.messages[: index + 1])
        prompt = _try(self.render, before, add_generation_prompt=True) if before else None
        begin = _common_length(prompt, rendered) if prompt is not None else 0
        if prompt is not None and begin < len(prompt):
            bare = _try(self.render, before)
            generation_at = _common_length(prompt, bare) if bare is not None else len(prompt)
            if begin < generation_at:
                # The answer changes the text before it (gpt-oss drops earlier thoughts): search the changed text for
                # the generation prompt.
                generation, context = prompt[generation_at:], rendered[: self._answer_begins(before, rendered)]
                begin = context.rfind(generation) + len(generation) if generation and generation in context else 0
                last_text = (before[-1].get("content") or "").strip()
                if last_text and any(form[-20:] in context[begin:] for form in _spellings(last_text)):
                    begin = 0  # the generation prompt belongs to an earlier turn
            elif thinks and _THOUGHT_CLOSED.search(prompt):
                prompt = rendered[:begin]  # with thoughts enabled, the template has another generation prompt
        if prompt is None or not begin:
            # If no generation prompt matches, compare with the same conversation and another answer.
            begin = self._answer_begins(before, rendered)
            prompt = rendered[:begin] if prompt is None else prompt
        completion = self._with_end(index, rendered, rendered[begin:].removeprefix(self.form.header))
        completion = _to_first(self.form.eos, completion)
        missing = _missing(message, completion)
        if not missing and thinks and (_THOUGHT_CLOSED.search(prompt) or len(_THOUGHT_END.findall(completion)) > 1):
            missing = "reasoning"  # an engine would parse a second thought as part of the answer
        if missing:
            raise BadRecord(_not_rendered(f"{missing} in messages[{index}],"))
        return prompt, completion

    def _answer_begins(self, before: Messages, rendered: str) -> int:
        """Return the index in `rendered` where the answer begins: where another answer's text differs first."""
        other = _try(self.render, [*before, {"role": "assistant", "content": PROBE}])
        if other is None:
            raise BadRecord("is rendered by the model's chat template in a way that hides where an answer begins")
        return min(_common_length(other, rendered), other.rfind(PROBE))

    def _with_end(self, index: int, rendered: str, completion: str) -> str:
        """Return `completion` with exactly one end of turn."""
        form, stops = self.form, self.stops
        body = completion.rstrip() if form.tail else completion
        if form.tail and body.endswith(form.tail):
            return body.removesuffix(form.tail) + form.end
        calls = self.messages[index].get("tool_calls")
        if not calls:
            return body if form.tail and stops(_last(body)) else body.removesuffix(form.blank) + form.end
        if form.tail:
            return body if self._closes(index, body) else body + form.end
        last = calls[-1]
        result = {"role": "tool", "content": PROBE, "tool_call_id": last["id"], "name": last["function"]["name"]}
        after = _try(self.render, [*self.messages[: index + 1], result])
        marker = _MARKER.match(after[len(rendered) :]) if after and after.startswith(rendered) else None
        return body.removesuffix(form.blank) + (marker[1] if marker and stops(marker[1]) else form.end)

    def _closes(self, index: int, body: str) -> bool:
        """Return whether a turn with calls has an end of turn of its own (gpt-oss's <|call|>) after its last call."""
        last, messages = _last(body), self.messages[: index + 1]
        if not self.stops(last):
            return False
        twice = {**messages[-1], "tool_calls": [*messages[-1]["tool_calls"], messages[-1]["tool_calls"][-1]]}
        doubled = _try(self.render, [*messages[:-1], twice])
        return doubled is None or doubled.count(last) <= self.render(messages).count(last)


def _last(text: str) -> str:
    """Return the marker or word at the end of a text."""
    last = re.search(r"<[^\s<>]+>$|\S+$", text)
    return last[0] if last else ""


def _not_rendered(part: str) -> str:
    return (
        f"has {part} which the model's chat template does not write, so it would not be trained; remove it, or give "
        "the model a chat template that writes it"
    )


def _end_of_turn(whole: str, prompt: str, completion: str, message: dict[str, Any]) -> int | None:
    """Return the index where the turn ends in the whole conversation's text; None if the turn differs there. Earlier
    turns may lack the empty thought with which the last turn begins: then the rest of the turn is compared."""
    head = whole[len(prompt) : len(prompt) + min(8, len(completion))] if whole.startswith(prompt) else ""
    for at in range(len(completion)) if head else ():
        if completion.startswith(head, at) and whole.startswith(rest := completion[at:], len(prompt)):
            return None if at and _missing(message, rest) else len(prompt) + len(rest)
    return None


def _common_length(first: str, second: str) -> int:
    """Return the length of the common prefix, cut at a marker: "<think>" and "<tool_call>" do not share "<"."""
    shared = os.path.commonprefix([first, second])
    within = re.search(r"<[^\s<>]*$", shared)
    return within.start() if within and len(shared) < min(len(first), len(second)) else len(shared)


def _missing(message: dict[str, Any], completion: str) -> str | None:
    """Return the name of a part of an assistant's message that the completion lacks; None if all parts are in it."""
    before, rest = "", completion
    for kind, text in _texts(message):
        form = next((form for form in _spellings(text) if form in rest), None)
        if form is None:
            return kind
        skipped, _, rest = rest.partition(form)
        before += skipped
    completion = before + rest  # search outside the message's own texts, which may contain the name of a function
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    for name, times in Counter(function["name"] for function in functions).items():
        if completion.count(name) < times:
            return f"a call of {name!r}"
    for function in functions:
        for leaf in _leaves(json.loads(function["arguments"])):
            if not any(form in completion for form in _spellings(leaf)):
                return f"the argument {leaf[:40]!r} of a call of {function['name']!r}"
    return None


def _texts(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if thought := (message.get("reasoning_content") or "").strip():
        yield "reasoning", thought
    pieces = _THOUGHT_TAGS.split(message.get("content") or "")
    for number, piece in enumerate(pieces, 1):
        if piece.strip():
            yield ("text" if number == len(pieces) else "reasoning"), piece.strip()


def _spellings(text: str) -> Iterator[str]:
    """Yield the spellings that templates use for a text."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts, keys and integers of a call's arguments; templates spell other values in several ways."""
    if isinstance(value, str) or type(value) is int:
        yield str(value)
    elif isinstance(value, (dict, list)):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _leaves(inner)


def _try(render: Render, messages: Messages, **options: Any) -> str | None:
    try:
        return render(messages, **options)
    except BadRecord:  # some templates refuse incomplete conversations
        return None
