"""An engine resolves adapters by name in vLLM's own table, and leases their files while requests may need them."""

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from serve.core.errors import WrongState
from serve.vllm.adapters import EngineAdapters
from weights.format.names import encode_name
from weights.memory.locks import DirectoryLock
from weights.tiers.copies import seal_dir

RESIDENT = 2


class Engine:
    """A stand-in for vLLM's AsyncLLM; its core has loaded the adapters in `there`."""

    def __init__(self, root: Path) -> None:
        self.model_config, self.renderer, self.input_processor = SimpleNamespace(model="/m"), None, None
        self.there: set[int] = set()
        self.root = root / "adapters"
        self.base = str(root / "versions" / "starter" / "v1")
        self.models: Any = OpenAIServingModels(self, [BaseModelPath(name="starter", model_path="/m")])  # type: ignore[arg-type]
        spec = SimpleNamespace(
            adapter_roots=(str(self.root),), adapter_source="", adapters_resident=RESIDENT, adapter_slots=1
        )
        self.limits = {"adapter_fetch_timeout_s": 1.0, "adapter_drain_timeout_s": 0.02}
        self.adapters = EngineAdapters(self, self.models, spec, self.limits)  # type: ignore[arg-type]
        self.adapters.serve_on(self.base)

    async def add_lora(self, request: LoRARequest) -> bool:
        self.there.add(request.lora_int_id)
        return True

    async def remove_lora(self, number: int) -> bool:
        self.there.remove(number)
        return True

    async def list_loras(self) -> set[int]:
        return set(self.there)

    def save(self, model: str, base_version: str = "v1") -> str:
        """Publish an adapter; return its name as in the gateway's requests."""
        path = self.root / encode_name(model) / "v1"
        path.mkdir(parents=True)
        save_file({"a": torch.zeros(2)}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text("{}")
        meta = {"base": "starter", "base_version": base_version}
        seal_dir(path, kind="adapter", model=model, version="v1", meta=meta)
        return f"{model}@v1"

    async def request(self, name: str) -> LoRARequest | None:
        """The adapter that a request refers to until its end (GenerateBaseServing); None: refused with 404."""
        if name in self.models.lora_requests:
            return self.models.lora_requests[name]
        found = await self.models.resolve_lora(name)
        return found if isinstance(found, LoRARequest) else None

    def free(self, name: str) -> bool:
        """Return whether the adapter's files may be removed."""
        gc.collect()
        lock = DirectoryLock.try_exclusive(self.root / encode_name(name.partition("@")[0]) / "v1")
        if lock is not None:
            lock.close()
        return lock is not None


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


async def test_resolve_adapter_matches_base_and_hides_version(engine: Engine) -> None:
    name, other = engine.save("ft:a"), engine.save("ft:b", base_version="v2")
    found = await engine.request(name)
    assert found is not None and Path(found.lora_path).name == "v1" and engine.there == {found.lora_int_id}
    assert engine.models.model_name(found) == "ft:a" and engine.models.model_name() == "starter"
    assert await engine.request(other) is None and await engine.request("ft:none@v1") is None
    assert engine.free(other)


async def test_closed_adapters_resolve_again_after_serve_on(engine: Engine) -> None:
    name = engine.save("ft:a")
    running = await engine.request(name)
    with pytest.raises(WrongState):
        await engine.adapters.close()
    assert await engine.request(name) is not None, "the base did not change"
    engine.limits["adapter_drain_timeout_s"] = 60.0
    close = asyncio.create_task(engine.adapters.close())
    await asyncio.sleep(0)
    assert await engine.request(name) is None
    del running
    await close
    assert not engine.there and engine.free(name)
    engine.adapters.serve_on(engine.base.replace("v1", "v2"))
    assert await engine.request(name) is None
    engine.adapters.serve_on(engine.base)
    assert await engine.request(name) is not None
