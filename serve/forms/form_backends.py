"""Makes each form use the grammar backend that it was checked for.

vLLM's check gives a form to xgrammar, or to llguidance where xgrammar declines it, and its engine core then follows all
forms with the backend of the first one that came. If the first form of an engine was one that xgrammar declines
(`multipleOf`), everybody's forced calls got 400 until that engine ended, because llguidance does not know xgrammar's
structural tags; and if it was one of xgrammar's, llguidance was never used. So here each form has its own backend.

Both write masks of the same shape, except if the tokenizer has more tokens than the model: then llguidance's mask is as
long as the tokenizer's vocabulary. Each of them, like vLLM's runner for GPUs, raises for a mask of another length,
which ends the engine. So all masks are as long as the model's vocabulary.

The core's thread asks the manager's backend, in its first step with a form, for memory for the masks, and ends if there
is none, while another thread takes in requests and makes backends. So the manager keeps the one that it has.

And llguidance's backend keeps the form that it compiles in an attribute, which it reads a line later: with two threads,
one could compile the other's form. So each thread compiles with a copy.

llguidance page-locks its masks where there is a GPU, and the first to do so in a process opens a CUDA context, about
0.5 GB on the first device, which no plan counts and no sleep frees. The core of a tensor-parallel engine has no context
else: its workers copy out of what it sends them. So the masks are xgrammar's, which locks nothing.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import xgrammar
from torch.nn import functional


def apply(manager: Any) -> None:
    """manager: vLLM's StructuredOutputManager, the class."""
    init, create, clear = manager.grammar_init, manager._create_grammar, manager.clear_backend

    @functools.wraps(init)
    def grammar_init(self: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        made = self.__dict__.setdefault("shm_backends", {})
        own = copy.copy(self)
        own.backend = made.get(_asked(request))  # None: it is created now, on the thread that takes in requests
        init(own, request)
        made[_asked(request)] = own.backend
        self.backend = self.backend or own.backend

    @functools.wraps(create)
    def _create_grammar(self: Any, request: Any) -> Any:
        # In a thread, perhaps before `grammar_init` has noted a new backend, which `self` then has.
        made = self.__dict__.get("shm_backends", {})
        own = copy.copy(self)
        own.backend = copy.copy(made.get(_asked(request), self.backend))
        return create(own, request)

    @functools.wraps(clear)
    def clear_backend(self: Any) -> None:
        for backend in self.__dict__.pop("shm_backends", {}).values():
            if backend is not self.backend:
                backend.destroy()
        clear(self)

    manager.grammar_init, manager._create_grammar, manager.clear_backend = grammar_init, _create_grammar, clear_backend


def lock_no_masks(backend: Any) -> None:
    """backend: vLLM's class of llguidance's."""
    backend.allocate_token_bitmask = lambda self, masks: xgrammar.allocate_token_bitmask(masks, self.vocab_size)


def masks_of_the_model(grammar: Any) -> None:
    """grammar: vLLM's class of llguidance's grammars."""
    fill = grammar.fill_bitmask

    @functools.wraps(fill)
    def fill_bitmask(self: Any, bitmask: torch.Tensor, idx: int) -> None:
        length, own_length = bitmask.shape[1], -(-self.ll_tokenizer.vocab_size // 32)
        if own_length == length:
            fill(self, bitmask, idx)
            return
        own = xgrammar.allocate_token_bitmask(1, self.ll_tokenizer.vocab_size)
        fill(self, own, 0)
        bitmask[idx] = functional.pad(own[0, :length], (0, max(0, length - own_length)))

    grammar.fill_bitmask = fill_bitmask


def _asked(request: Any) -> str | None:
    params = request.sampling_params
    found = None if params is None or params.structured_outputs is None else params.structured_outputs._backend
    return found if isinstance(found, str) else None
