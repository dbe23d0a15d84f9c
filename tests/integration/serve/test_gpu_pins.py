"""No engine on a GPU compiles kernels by nvcc at its start, judged by vLLM's parser, configuration and variables."""

import copy
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.kernel import KernelConfig
from vllm.config.vllm import OPTIMIZATION_LEVEL_TO_CONFIG
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.platforms.interface import DeviceCapability
from vllm.utils import deep_gemm
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.selector import AttentionSelectorConfig

from runtime.devices.kinds import kind_of
from serve.core.model_settings import ModelSettings
from serve.vllm.arguments import engine_arguments, engine_environment
from serve.vllm.patches import prefer_ready_made
from tests.unit.serve.specs import spec


@pytest.fixture(scope="module")
def parser():
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def on_two_gpus(**more):
    return spec(kind="cuda", devices=(0, 1), tensor_parallel=2, numa_nodes=(None, None), **more)


def configured(args, defaults):
    """vLLM's (allreduce fusion, autotuning) for these arguments if every conditional default is on."""
    config = object.__new__(VllmConfig)
    config.compilation_config = copy.deepcopy(args.compilation_config)
    config.kernel_config = KernelConfig(enable_flashinfer_autotune=args.enable_flashinfer_autotune)
    config._apply_optimization_level_defaults(_all_on(defaults))
    return config.compilation_config.pass_config.fuse_allreduce_rms, config.kernel_config.enable_flashinfer_autotune


def _all_on(defaults):
    return {
        key: _all_on(value) if isinstance(value, dict) else (lambda _: True) if callable(value) else value
        for key, value in defaults.items()
    }


@pytest.mark.parametrize("level", OPTIMIZATION_LEVEL_TO_CONFIG)
def test_optimisation_levels_keep_flashinfer_kernels_off(parser, level):
    defaults = OPTIMIZATION_LEVEL_TO_CONFIG[level]
    settings = ModelSettings(engine_args={"optimization-level": str(int(level))})
    served = on_two_gpus(**settings.spec_fields())
    # The server's own arguments, such as its socket, belong to another parser.
    args = AsyncEngineArgs.from_cli_args(parser.parse_known_args(engine_arguments(served, {}, None))[0])
    assert int(args.optimization_level) == level
    assert configured(args, defaults) == (False, False)
    bare = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", "/v"]))
    assert configured(bare, defaults) == (level >= 2, level >= 1), "else vLLM changed its defaults: check what they run"


def test_gated_delta_nets_prefill_with_triton(parser, monkeypatch):
    hopper = SimpleNamespace(
        is_rocm=lambda: False, is_cuda=lambda: True, is_device_capability=lambda capability: capability == 90
    )
    monkeypatch.setattr(qwen_gdn_linear_attn, "current_platform", hopper)
    text = SimpleNamespace(linear_key_head_dim=128, linear_value_head_dim=128)

    def taken(arguments):
        args = AsyncEngineArgs.from_cli_args(parser.parse_known_args(arguments)[0])
        more = {} if args.gdn_prefill_backend is None else {"gdn_prefill_backend": args.gdn_prefill_backend}
        config = SimpleNamespace(additional_config=more, model_config=SimpleNamespace(hf_text_config=text))
        return qwen_gdn_linear_attn._resolve_gdn_prefill_backend(config)[1]

    assert taken(engine_arguments(on_two_gpus(), {}, None)) == "triton"
    assert taken(["--model", "/v"]) == "flashinfer", "else vLLM changed its default: check what it compiles"


def test_environment_disables_flashinfer_defaults(monkeypatch):
    for name, value in engine_environment(on_two_gpus(), 8).items():
        monkeypatch.setenv(name, value)
    judged = {name: getattr(envs, name) for name in envs.environment_variables if "FLASHINFER" in name}
    on = {name for name, value in judged.items() if value is True}
    assert judged and on == set()


@pytest.fixture
def platform(monkeypatch):
    """vLLM's platform for NVIDIA GPUs with every attention backend; backends without FP8 refuse it."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    module = importlib.import_module("vllm.platforms.cuda")
    monkeypatch.setattr("vllm.utils.flashinfer.has_flashinfer", lambda: False)

    def refuses(backend, asked):
        hopper = asked["device_capability"].major == 9
        without = {"FLEX_ATTENTION", "TURBOQUANT"} | (set() if hopper else {"FLASH_ATTN"})
        return asked["kv_cache_dtype"] == "fp8" and backend.name in without

    monkeypatch.setattr(module, "_get_attn_backend_class", lambda backend: SimpleNamespace(
        validate_configuration=lambda **asked: ["no FP8"] * refuses(backend, asked)
    ))  # fmt: skip
    yield type("Own", (module.NvmlCudaPlatform,), {})
    del sys.modules[module.__name__]


def taken(platform, capability, **asked):
    model = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, block_size=None, **asked)
    found, _ = platform.get_valid_backends(DeviceCapability(*capability), model, num_heads=32)
    return min(found, key=lambda one: one.priority).backend.name


@pytest.mark.parametrize(
    ("capability", "asked", "before", "now"),
    [
        ((8, 0), {"kv_cache_dtype": "auto"}, "FLASH_ATTN", "FLASH_ATTN"),
        ((8, 9), {"kv_cache_dtype": "fp8"}, "FLASHINFER", "TRITON_ATTN"),
        ((9, 0), {"kv_cache_dtype": "fp8"}, "FLASH_ATTN", "FLASH_ATTN"),
        ((10, 0), {"kv_cache_dtype": "auto"}, "FLASHINFER", "FLASH_ATTN"),
        ((10, 0), {"kv_cache_dtype": "auto", "use_mla": True}, "FLASHINFER_MLA", "TOKENSPEED_MLA"),
        ((12, 0), {"kv_cache_dtype": "fp8"}, "FLASHINFER", "TRITON_ATTN"),
    ],
)
def test_prefer_ready_made_avoids_compiled_attention(platform, capability, asked, before, now):
    assert taken(platform, capability, **asked) == before, "else vLLM changed the order: check which need nvcc"
    prefer_ready_made(platform, kind_of("cuda"))
    assert taken(platform, capability, **asked) == now
    prefer_ready_made(platform, SimpleNamespace(compiled_attention=""))  # an empty name filters nothing
    assert taken(platform, capability, **asked) == now


@pytest.mark.parametrize("told", [False, True])
def test_environment_disables_deepgemm_for_fp8(monkeypatch, told):
    """Simulates a Hopper GPU with the DeepGEMM package of vLLM's CUDA build, the only conditions that vLLM checks."""
    monkeypatch.setattr(type(deep_gemm.current_platform), "support_deep_gemm", classmethod(lambda _: True))
    monkeypatch.setattr(deep_gemm, "has_deep_gemm", lambda: True)
    for name, value in engine_environment(on_two_gpus(), 8).items() if told else ():
        monkeypatch.setenv(name, value)
    deep_gemm.is_deep_gemm_supported.cache_clear()
    try:
        assert deep_gemm.is_deep_gemm_supported() is not told
    finally:
        deep_gemm.is_deep_gemm_supported.cache_clear()
