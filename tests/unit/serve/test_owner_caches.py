"""What an engine keeps of one owner's pictures and forms makes nothing quicker for another, and tells him nothing."""

from __future__ import annotations

import asyncio
import functools
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

from appliance.gateway.routing.table import cache_salt
from serve.api import fair_order
from serve.api.turns import ThreadsInTurns
from serve.forms import form_backends
from serve.vllm import owner_caches
from tests.train_support.tiny import tokenizer

LIMIT = 12 << 20
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


def asking(salt: str | None, spec: str = FORM, version: str = "") -> Any:
    return SimpleNamespace(cache_salt=version + (salt or "") or None, spec=spec, sampling_params=None)


def text(length: int) -> str:
    return FORM.replace("90", str(length))


def test_a_form_that_another_owner_has_asked_for_is_compiled_anew(manager: Any) -> None:
    """So are its parts, which xgrammar keeps for other forms."""
    made = {owner: manager._create_grammar(asking(owner and cache_salt(owner)))[0] for owner in ("a", "b", None)}
    assert len({id(compiler) for compiler in made.values()}) == 3
    for owner, compiler in made.items():
        size = compiler.get_cache_size_bytes()
        for own in ("", "x"):
            again = asking(owner and cache_salt(owner, own))
            assert manager._create_grammar(again)[0] is compiler, "whatever his own salt"
        assert compiler.get_cache_size_bytes() == size > 0, "it is kept for its owner"


def held(manager: Any) -> dict[str, int]:
    return {owner: one.get_cache_size_bytes() for owner, one in manager.backend.compiler.shm_of._of.items()}


def test_owners_who_hold_little_keep_it_whatever_one_of_them_asks_for(manager: Any) -> None:
    few = [cache_salt(str(number)) for number in range(12)]
    for salt in few:
        manager._create_grammar(asking(salt))
    before = held(manager)
    for number in range(30):
        manager._create_grammar(asking(cache_salt("much", str(number)), text(1000 + number)))
        assert sum(held(manager).values()) <= LIMIT
    assert all(held(manager)[salt] == before[salt] > 0 for salt in few)
    assert not manager.backend.compiler.get_cache_size_bytes()


@pytest.mark.parametrize("salt", [None, cache_salt("alone")], ids=["one team", "one owner"])
def test_one_alone_has_all_that_is_kept(manager: Any, salt: str | None) -> None:
    for number in range(12):
        compiler, _ = manager._create_grammar(asking(salt, text(1000 + number)))
    assert LIMIT * 0.9 < compiler.get_cache_size_bytes() < LIMIT * 1.1


def test_owners_who_ask_for_nothing_that_is_kept_are_bounded_too(manager: Any) -> None:
    compilers = manager.backend.compiler.shm_of
    compilers._limit = 1 << 20
    for number in range(1000):
        compilers.of(str(number))
    compilers.trim()
    assert 0 < len(held(manager)) < 1000 and "999" in held(manager), "who asked last"
