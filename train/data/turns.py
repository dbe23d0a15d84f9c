"""Finds what the model is to write in a rendered conversation, under any chat template. Pure, on text.

An engine is asked with the conversation up to a turn and the template's generation prompt; what the model is to write
is the rest of that turn, with the end of turn at which an engine stops. So a trained turn is `prompt + written`, the
prompt being the very text that an engine sees. Turns whose prompt and answer are in the text of the whole conversation
share one row. Where a template writes earlier turns otherwise than the last one (Qwen 3 drops their thoughts, gpt-oss
ends them with another token), such a turn is a row of its own.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from train.data.records import BadRecord

Messages = Sequence[dict[str, Any]]
Render = Callable[..., str]
"""(messages, tools, add_generation_prompt=False) to text. Raises BadRecord for what the template refuses."""

PROBE = "Zq7xV"  # stands for an answer; no template has it
_MARKER = re.compile(r"\s*(<[^\s<>]+>)")
_THOUGHT_TAGS = re.compile(r"</?think>")
_THOUGHT_END = re.compile(r"</[^<>\s]*think[^<>\s]*>|\[/THINK\]|<\|END_THINKING\|>")
_THOUGHT_CLOSED = re.compile(rf"(?:{_THOUGHT_END.pattern})\s{{0,4}}\Z")
_TOOL = {"type": "function", "function": {"name": "a", "description": "b", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class Row:
    """text: what is tokenised. spans: (start, end) characters of it that are trained; text[:start] is the prompt."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TurnForm:
    """How a template begins and ends an answer.

    header: the text before an answer; if a generation prompt lacks it, it is cut from the answer. tail: the text after
    the last answer, without the blank space at its very end, which is `blank`. end: what is trained instead of it: the
    first token that ends an answer or, without a tail, the marker of the next turn (GLM's "<|user|>"). eos: the
    tokenizer's end of text, at which every engine stops.
    """

    header: str
    tail: str
    blank: str
    end: str
    eos: str = ""


def turn_form(render: Render, stops: Callable[[str], bool], eos: str | None) -> TurnForm:
    """The form of the template behind `render`. stops: whether a text has a token at which an engine can stop. eos: the
    tokenizer's end of text, added where the template's own end is no such token: an engine would never stop."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}
    system = {"role": "system", "content": "b"}
    # Some templates insist on a system prompt, or are for tools alone.
    for start, tools in (([user], None), ([system, user], None), ([system, user], [_TOOL])):
        if (text := _try(render, [*start, answer], tools)) is not None:
            break
    if text is None or PROBE not in text:
        return TurnForm("", "", "", eos or "", eos or "")
    before, _, tail = text.rpartition(PROBE)
    question = _try(render, start, tools)
    header = before[len(question) :] if question is not None and before.startswith(question) else ""
    within = (_try(render, [*start, answer, {"role": "user", "content": "c"}], tools) or text).rpartition(PROBE)[2]
    tail, blank = tail.rstrip(), tail[len(tail.rstrip()) :]
    end, marker = tail, re.match(r"\s*(?:<[^\s<>]+>|\S+)", tail)
    if not within.startswith(tail) and marker and stops(marker[0]):
        end = marker[0]  # what follows it ends the last turn alone, as Phi 3's <|endoftext|>
    if not tail and (marker := _MARKER.match(within)):
        end = marker[1]
    end = _to_first(eos, end) if stops(end) else end + (eos or "")
    return TurnForm(header if header.strip() else "", tail, blank, end, eos or "")


def _to_first(eos: str | None, text: str) -> str:
    """The text up to the first end of text, after which no engine goes on."""
    return text[: text.index(eos) + len(eos)] if eos and eos in text else text


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with their tools, under a template (`render`) of this form. stops: as `turn_form` has it."""

    render: Render
    messages: Messages
    tools: Any
    form: TurnForm
    stops: Callable[[str], bool]

    def rows(self, *, apart: bool = False) -> list[Row]:
        """One for all trained turns where they line up, and one for each that does not. apart: one for each trained
        turn in any case. Raises BadRecord where the template loses something of a trained turn."""
        messages = self.messages
        whole = self.render(messages, self.tools)
        together: list[tuple[int, int]] = []
        checked = 0
        own: list[Row] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight", 1) == 0:
                continue
            prompt, written = self._turn(index)
            for number in range(checked, index):
                role, text = messages[number]["role"], (messages[number].get("content") or "").strip()
                if role in ("system", "user") and not any(form in prompt for form in _forms(text)):
                    raise BadRecord(_unwritten(f"the text of messages[{number}], from {role!r},"))
            checked = index
            if index == len(messages) - 1 and whole.startswith(prompt):
                whole = prompt + written  # with its end of turn, which some templates leave to the next message
            end = None if apart else _end_in(whole, prompt, written, message)
            if end is None:
                own.append(Row(prompt + written, ((len(prompt), len(prompt) + len(written)),)))
            else:
                together.append((len(prompt), end))
        return own + ([Row(whole[: together[-1][1]], tuple(together))] if together else [])

    def _turn(self, index: int) -> tuple[str, str]:
        """(prompt, written) of the assistant's turn `messages[index]`. Raises BadRecord."""
        before, message = self.messages[:index], self.messages[index]
        thinks = any(kind == "reasoning" for kind, _ in _texts(message))
        through = self.render(self.messages[: index + 1], self.tools)
        prompt = self._try(before, add_generation_prompt=True) if before else None
        parting = _parting(prompt, through) if prompt is not None else 0
        if prompt is not None and parting < len(prompt):
            bare = self._try(before)
            ask_at = _parting(prompt, bare) if bare is not None else len(prompt)  # where the generation prompt begins
            if parting < ask_at:
                # What came before is written otherwise once it is answered (gpt-oss drops earlier thoughts): the answer
                # begins after the generation prompt, where that is written.
                ask, head = prompt[ask_at:], through[: self._answer_begins(before, through)]
                parting = head.rfind(ask) + len(ask) if ask and ask in head else 0
                last_text = (before[-1].get("content") or "").strip()
                if last_text and any(form[-20:] in head[parting:] for form in _forms(last_text)):
                    parting = 0  # it is the prompt of an earlier turn
            elif thinks and _THOUGHT_CLOSED.search(prompt):
                prompt = through[:parting]  # the template thinks where a request asks for it: that prompt is its own
        if prompt is None or not parting:
            # There is no prompt to compare with: render another answer and see where the two part.
            parting = self._answer_begins(before, through)
            prompt = through[:parting] if prompt is None else prompt
        written = self._ended(index, through, through[parting:].removeprefix(self.form.header))
        written = _to_first(self.form.eos, written)
        lost = _lost(message, written)
        if not lost and thinks and (_THOUGHT_CLOSED.search(prompt) or len(_THOUGHT_END.findall(written)) > 1):
            lost = "reasoning"  # it comes after the template's own, so that an engine reads it as the answer
        if lost:
            raise BadRecord(_unwritten(f"{lost} in messages[{index}],"))
        return prompt, written

    def _answer_begins(self, before: Messages, through: str) -> int:
        """Where the text of an answer begins in `through`: two answers part there."""
        other = self._try([*before, {"role": "assistant", "content": PROBE}])
        if other is None:
            raise BadRecord(
                "is rendered by the model's chat template in a way that does not show where an answer begins"
            )
        return min(_parting(other, through), other.rfind(PROBE))

    def _ended(self, index: int, through: str, written: str) -> str:
        """`written` with exactly one end of turn."""
        form, stops = self.form, self.stops
        body = written.rstrip() if form.tail else written
        if form.tail and body.endswith(form.tail):
            return body.removesuffix(form.tail) + form.end
        calls = self.messages[index].get("tool_calls")
        if not calls:
            return body if form.tail and stops(_last(body)) else body.removesuffix(form.blank) + form.end
        if form.tail:
            return body if self._closes(index, body) else body + form.end
        identity, name = calls[-1].get("id", ""), name_of(calls[-1])
        result = {"role": "tool", "content": PROBE, "tool_call_id": identity, "name": name}
        after = self._try([*self.messages[: index + 1], result])
        marker = _MARKER.match(after[len(through) :]) if after and after.startswith(through) else None
        return body.removesuffix(form.blank) + (marker[1] if marker and stops(marker[1]) else form.end)

    def _closes(self, index: int, body: str) -> bool:
        """Whether a turn of calls ends with an end of turn of its own (gpt-oss's <|call|>), not with the end of a
        call."""
        last, messages = _last(body), self.messages[: index + 1]
        if not self.stops(last):
            return False
        twice = {**messages[-1], "tool_calls": [*messages[-1]["tool_calls"], messages[-1]["tool_calls"][-1]]}
        doubled = self._try([*messages[:-1], twice])
        return doubled is None or doubled.count(last) <= self.render(messages, self.tools).count(last)

    def _try(self, messages: Messages, **options: Any) -> str | None:
        return _try(self.render, messages, self.tools, **options)


def prompt(render: Render, messages: Messages, tools: Any) -> str:
    """What an engine is asked with after these messages. Raises BadRecord where the template leaves their calls out."""
    text = render(messages, tools, add_generation_prompt=True)
    if any(message.get("tool_calls") for message in messages):
        bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        if _try(render, bare, tools, add_generation_prompt=True) == text:
            raise BadRecord("has calls, which the model's chat template does not write")
    return text


def _last(text: str) -> str:
    """The marker or word at its end."""
    last = re.search(r"<[^\s<>]+>$|\S+$", text)
    return last[0] if last else ""


def _unwritten(what: str) -> str:
    return (
        f"has {what} which the model's chat template does not write: nothing of it would be trained; remove it, or "
        "give the model a chat template that writes it"
    )


def _end_in(whole: str, prompt: str, written: str, message: dict[str, Any]) -> int | None:
    """Where in the text of the whole conversation the turn ends; None if it is written otherwise there. Earlier turns
    may lack what only the last one begins with, an empty thought: then the rest of it counts."""
    head = whole[len(prompt) : len(prompt) + min(8, len(written))] if whole.startswith(prompt) else ""
    for at in range(len(written)) if head else ():
        if written.startswith(head, at) and whole.startswith(rest := written[at:], len(prompt)):
            return None if at and _lost(message, rest) else len(prompt) + len(rest)
    return None


def _parting(one: str, other: str) -> int:
    """Where two texts part, outside of a marker: "<think>" and "<tool_call>" part before the "<"."""
    shared = os.path.commonprefix([one, other])
    within = re.search(r"<[^\s<>]*$", shared)
    return within.start() if within and len(shared) < min(len(one), len(other)) else len(shared)


def _lost(message: dict[str, Any], written: str) -> str | None:
    """What of an assistant's message is not in what is written of it; None if all is."""
    before, rest = "", written
    for kind, text in _texts(message):
        form = next((form for form in _forms(text) if form in rest), None)
        if form is None:
            return kind
        skipped, _, rest = rest.partition(form)
        before += skipped
    written = before + rest  # without the texts, which may name a function too
    names = [name_of(call) for call in message.get("tool_calls") or ()]
    for name in dict.fromkeys(names):
        if written.count(name) < names.count(name):
            return f"{names.count(name)} calls of {name!r}" if name in written else f"a call of {name!r}"
    for call, name in zip(message.get("tool_calls") or (), names, strict=True):
        for leaf in _leaves(call["function"]["arguments"]):
            if not any(form in written for form in _forms(leaf)):
                return f"the argument {leaf[:40]!r} of a call of {name!r}"
    return None


def _texts(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if thought := (message.get("reasoning_content") or "").strip():
        yield "reasoning", thought
    pieces = _THOUGHT_TAGS.split(message.get("content") or "")
    for number, piece in enumerate(pieces, 1):
        if piece.strip():
            yield ("text" if number == len(pieces) else "reasoning"), piece.strip()


def _forms(text: str) -> Iterator[str]:
    """The ways in which templates write a text."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


def _leaves(value: Any) -> Iterator[str]:
    """The texts, keys and whole numbers of a call's arguments; templates write other values in several ways."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)


def name_of(call: dict[str, Any]) -> str:
    return str(call["function"]["name"])


def _try(render: Render, messages: Messages, tools: Any = None, **options: Any) -> str | None:
    try:
        return render(messages, tools, **options)
    except BadRecord:  # templates may insist on whole conversations
        return None
