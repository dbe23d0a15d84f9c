"""What an engine keeps of one owner's pictures and forms makes nothing quicker for another, and tells him nothing."""

from __future__ import annotations

import asyncio
import functools
import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from PIL import Image
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.hf import HfRenderer
from vllm.utils.async_utils import make_async

from serve.api import fair_order, form_backends
from serve.api.turns import ThreadsInTurns
from serve.vllm import owner_caches
from tests.train_support.tiny import tokenizer

LIMIT = 64 << 20
FORM = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 90}}, "required": ["a"]}'


async def test_a_picture_that_another_owner_has_sent_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    known, read = set[str](), list[str]()
    salted = type("Salted", (ProcessorInputs,), {})

    class Renderer(HfRenderer):
        def _process_multimodal(self, tokens: Any, data: Any, **_: Any) -> Any:  # type: ignore[override]
            inputs = salted(tokens, MultiModalDataParser().parse_mm_data(data))
            (name,) = inputs.get_mm_hashes("model", "blake3")["image"]
            if name not in known:
                known.add(name)
                read.append(name)
            return {"type": "multimodal"}

    owner_caches.salt_pictures(Renderer, salted)
    renderer, pool = object.__new__(Renderer), ThreadPoolExecutor(1)
    pool.submit = functools.partial(fair_order._asked, ThreadsInTurns(pool.submit, 1, 1))  # type: ignore[method-assign]
    renderer._process_multimodal_async = make_async(renderer._process_multimodal, executor=pool)

    async def asked(salt: str | None, colour: str = "red") -> int:
        picture = {"image": [Image.new("RGB", (8, 8), colour)]}
        await renderer._process_tokens_async({"prompt_token_ids": [1], "multi_modal_data": picture, "cache_salt": salt})
        return len(read)

    assert [await asked("a"), await asked("a"), await asked("b"), await asked("a", "blue")] == [1, 1, 2, 3]
    assert [await asked("b"), await asked(None), await asked(None)] == [3, 4, 4], "one team's box shares them"
    await asyncio.gather(*(asked(salt, "green") for salt in "abcabc"))
    assert len(read) == 4 + 3, "whoever asks at the same time"
    pool.shutdown()


@pytest.fixture
def manager() -> Any:
    """Of vLLM's what compiles a form, as the box has it."""

    class Compiler(xgrammar.GrammarCompiler):
        pass

    class Backend:
        def __init__(self) -> None:
            tokens = xgrammar.TokenizerInfo.from_huggingface(tokenizer())
            self.compiler = Compiler(tokens, max_threads=8, cache_enabled=True, cache_limit_bytes=LIMIT)

        def compile_grammar(self, spec: str) -> Any:
            return self.compiler, self.compiler.compile_json_schema(spec)

    class Manager:
        def __init__(self) -> None:
            self.backend = Backend()

        def grammar_init(self, request: Any) -> None:
            pass

        def clear_backend(self) -> None:
            pass

        def _create_grammar(self, request: Any) -> Any:
            return self.backend.compile_grammar(request.spec)

    form_backends.apply(Manager)
    owner_caches.compile_apart(Manager, Backend, Compiler)
    return Manager()


def asking(salt: str | None, spec: str = FORM, version: str | None = None) -> Any:
    found = SimpleNamespace(cache_salt=salt, spec=spec, sampling_params=None)
    if version is not None:
        found.cache_salt, found.shm_salt = version + (salt or "") or None, version
    return found


def test_a_form_that_another_owner_has_asked_for_is_compiled_anew(manager: Any) -> None:
    """So are its parts, which xgrammar keeps for other forms."""
    made = {salt: manager._create_grammar(asking(salt))[0] for salt in ("a", "b", None)}
    assert len({id(compiler) for compiler in made.values()}) == 3
    for salt, compiler in made.items():
        size = compiler.get_cache_size_bytes()
        for version in (None, "v2"):
            assert manager._create_grammar(asking(salt, version=version))[0] is compiler, "whichever version answers"
        assert compiler.get_cache_size_bytes() == size > 0, "it is kept for its owner"


def test_what_is_kept_of_all_owners_is_bounded(manager: Any) -> None:
    for number in range(3 * owner_caches.OWNERS):
        manager._create_grammar(asking(str(number)))
        manager._create_grammar(asking("0"))
    first = manager._create_grammar(asking("0"))[0]
    assert first.get_cache_size_bytes() > 0
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is type(first) and one is not manager.backend.compiler]
    assert len(kept) == owner_caches.OWNERS and sum(one.cache_limit_bytes for one in kept) <= LIMIT
    assert not manager.backend.compiler.get_cache_size_bytes()
