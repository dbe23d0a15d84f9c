"""A form is followed by the backend that it was checked for, whichever came first, and however threads take turns."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import llguidance.torch
import pytest
import torch
import xgrammar
from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from serve.forms import form_backends
from tests.train_support.tiny import tokenizer

_PLAIN = {"disable_any_whitespace": False, "disable_additional_properties": False}


class Backend:
    def __init__(self, name: str) -> None:
        self.name, self.ended = name, 0
        self.meanwhile: list[Callable[[], Any]] = []

    def compile_grammar(self, spec: str) -> str:
        self.spec = spec  # as llguidance's does
        if self.meanwhile:
            self.meanwhile.pop()()
        return f"{self.name} {self.spec}"

    def destroy(self) -> None:
        self.ended += 1


class Manager:
    """Of vLLM's manager what makes, asks and ends its one backend, as it is in 0.32; grammars are made later, in
    threads."""

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self.made: list[Backend] = []
        self.later: list[Any] = []
        self.looks: list[Callable[[], Any]] = []

    def grammar_init(self, request: Any) -> None:
        if request.structured_output_request is None:
            return
        if self.backend is None:
            for look in self.looks:
                look()  # another thread, while it is made
            self.backend = Backend(request.sampling_params.structured_outputs._backend)
            self.made.append(self.backend)
        self.later.append(lambda: self._create_grammar(request))

    def _create_grammar(self, request: Any) -> str:
        assert self.backend is not None
        return self.backend.compile_grammar(request.structured_output_request)

    def clear_backend(self) -> None:
        if self.backend is not None:
            self.backend.destroy()
            self.backend = None


@pytest.fixture
def manager() -> Any:
    own = type("Own", (Manager,), {})
    form_backends.apply(own)
    return own()


def asking(backend: str, spec: str | None) -> Any:
    params = SimpleNamespace(structured_outputs=SimpleNamespace(_backend=backend))
    return SimpleNamespace(structured_output_request=spec, sampling_params=params)


@pytest.mark.parametrize("first", ["guidance", "xgrammar"])
def test_no_form_decides_what_follows_those_of_others(manager: Any, first: str) -> None:
    second = {"guidance": "xgrammar", "xgrammar": "guidance"}[first]
    for backend, spec in ((first, "a"), (second, "b"), (first, "c")):
        manager.grammar_init(asking(backend, spec))
    # The threads come to them when all have been taken in.
    assert [make() for make in manager.later] == [f"{first} a", f"{second} b", f"{first} c"]
    assert [backend.name for backend in manager.made] == [first, second]


def test_no_form_is_compiled_for_another_request_whose_thread_came_between(manager: Any) -> None:
    for spec in ("a", "b"):
        manager.grammar_init(asking("guidance", spec))
    first, second = manager.later
    manager.made[0].meanwhile.append(second)
    assert first() == "guidance a"


def test_a_step_finds_a_backend_while_another_is_made(manager: Any) -> None:
    """vLLM's grammar_bitmask, in the core's thread, ends the engine if there is none."""
    manager.grammar_init(asking("xgrammar", "a"))
    seen: list[str] = []
    manager.looks.append(lambda: seen.append(manager.backend.name))
    manager.grammar_init(asking("guidance", "b"))
    assert seen == ["xgrammar"] and manager.backend.name == "xgrammar"
    assert [make() for make in manager.later] == ["xgrammar a", "guidance b"]


def test_a_backend_that_cannot_be_made_leaves_the_one_that_is_there(manager: Any) -> None:
    manager.grammar_init(asking("xgrammar", "a"))

    def fails() -> None:
        raise ValueError("no such tokenizer")

    manager.looks.append(fails)
    with pytest.raises(ValueError, match="no such tokenizer"):
        manager.grammar_init(asking("guidance", "b"))
    assert manager.backend.name == "xgrammar"


def test_a_request_without_a_form_makes_nothing(manager: Any) -> None:
    manager.grammar_init(asking("xgrammar", None))
    manager.grammar_init(SimpleNamespace(structured_output_request=None, sampling_params=None))
    assert manager.made == [] and manager.backend is None


def test_all_of_them_end_once_with_the_engine(manager: Any) -> None:
    for backend in ("guidance", "xgrammar"):
        manager.grammar_init(asking(backend, "a"))
    manager.clear_backend()
    assert [backend.ended for backend in manager.made] == [1, 1] and manager.backend is None
    manager.clear_backend()
    assert [backend.ended for backend in manager.made] == [1, 1]


@pytest.mark.parametrize("tokens", [31, 32, 49_152, 151_936])
def test_both_write_masks_of_one_shape(tokens: int) -> None:
    of_one, of_other = xgrammar.allocate_token_bitmask(2, tokens), llguidance.torch.allocate_token_bitmask(2, tokens)
    assert of_one.shape == of_other.shape and of_one.dtype == of_other.dtype


@pytest.mark.parametrize("known", [320, 325, 352, 384])
def test_masks_are_as_long_as_the_model_though_its_tokenizer_is_longer_or_shorter(known: int) -> None:
    """Of a vocabulary of 320 tokens a mask has 10 words, and a tokenizer of 326 makes one of 11."""
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<picture>"]})
    grammars = type("Own", (backend_guidance.GuidanceGrammar,), {})
    form_backends.masks_of_the_model(grammars)
    of_model = type("Own", (backend_guidance.GuidanceBackend,), {})
    form_backends.lock_no_masks(of_model)
    backend = of_model(SimpleNamespace(structured_outputs_config=SimpleNamespace(**_PLAIN)), words, known)
    made = backend.compile_grammar(StructuredOutputOptions.JSON, '{"type": "integer"}')
    one = grammars(made.ll_matcher, made.ll_tokenizer, known)
    masks = backend.allocate_token_bitmask(2)
    assert masks.shape == (2, -(-known // 32))
    one.fill_bitmask(masks, 1)
    allowed = [token for token in range(known) if masks[1, token // 32] >> (token % 32) & 1]
    assert sorted(words.decode([token]) for token in allowed)[:2] == ["-", "0"]
    assert set(masks[0].tolist()) == {-1}, "another request's"


def test_no_mask_is_page_locked_in_a_core_that_may_have_no_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(backend_guidance.GuidanceBackend):
        def __init__(self) -> None:
            self.ll_tokenizer = SimpleNamespace(vocab_size=33)
            self.vocab_size = 33

    locked: list[bool] = []
    full = torch.full

    def seen(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        locked.append(pin_memory)
        return full(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "full", seen)
    Own().allocate_token_bitmask(3)
    form_backends.lock_no_masks(Own)
    assert Own().allocate_token_bitmask(3).shape == (3, 2)
    assert locked == [True, False], "or llguidance locks nothing any more"
