"""Runs in an environment with the CUDA packages and stub drivers: imports a warm parent's modules, forks, and in the
child turns an engine's command line into vLLM's configuration.

    python -m tests.cuda.closure serve MODEL_DIRECTORY     or: train

Prints one line of JSON. The stub of libcuda ends the process at its first call (test_wheels_soak.py).
"""

import ctypes
import importlib
import json
import os
import sys
import threading
from pathlib import Path

import psutil

from runtime.devices import kinds, nvml

SPEC = {"replica_id": "r", "model": "m", "version": "v1", "kind": "cuda", "kv_cache_bytes": 2**30, "dtype": "bfloat16"}


def main(half: str, model: str = "") -> int:
    nvml.CONTROL = Path(os.devnull)  # pretend that a driver exists
    assert kinds.present().name == "cuda"
    importlib.import_module({"serve": "serve.engine.preload", "train": "train.trainer.preload"}[half])
    import torch

    report = {"modules": len(sys.modules), "initialized": torch.cuda.is_initialized(), "bad_fork": False}
    assert not torch.cuda.is_initialized()
    report["threads"] = [thread.name for thread in threading.enumerate()]
    report["children"] = len(psutil.Process().children())
    child = os.fork()
    if child == 0:
        os._exit(_child(half, model))
    report["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    report["flashinfer"] = any(name.split(".")[0] == "flashinfer" for name in sys.modules)
    print(json.dumps(report), flush=True)
    return report["child"]


def _child(half: str, model: str) -> int:
    import torch

    if torch.cuda._is_in_bad_fork():
        print("CUDA was initialised before the fork", file=sys.stderr, flush=True)
        return 3
    if half == "serve":
        for tensor_parallel in (1, 2):
            _configure(model, tensor_parallel)
        _import_classes()
    # Prove that the stub is used: the call ends this process with the stub's exit code.
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    return 4


def _configure(model: str, tensor_parallel: int) -> None:
    from serve.core.spec import ReplicaSpec
    from serve.engine.main import PARSER, AsyncEngineArgs, engine_arguments, engine_environment, plugin, read_config

    spec = ReplicaSpec(
        **{
            **SPEC,
            "version_path": model,
            "shm_root": model,
            "socket_path": "/run/s",  # short enough in any test folder; never created
            "devices": list(range(tensor_parallel)),
            "numa_nodes": [None] * tensor_parallel,
            "tensor_parallel": tensor_parallel,
        }
    )
    os.environ.update(engine_environment(spec, 8))
    plugin.register()
    options = PARSER.parse_args(engine_arguments(spec, read_config(model), None))
    config = AsyncEngineArgs.from_cli_args(options).create_engine_config()
    assert config.use_v2_model_runner and config.scheduler_config.async_scheduling
    assert config.use_cumem_cudagraph_pool, "a sleeping engine keeps its CUDA graphs"
    assert not config.compilation_config.pass_config.fuse_allreduce_rms
    assert not config.kernel_config.enable_flashinfer_autotune
    print(f"configured for {tensor_parallel}", file=sys.stderr, flush=True)


def _import_classes() -> None:
    """Import two classes of image models, as the front end does before it forks; one has gated delta nets."""
    from vllm.model_executor.models.registry import ModelRegistry

    from serve.vllm import patches

    patches.apply("cuda", eager=False, segment_prefix="r-")
    for architecture in ("Qwen2_5_VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration"):
        assert ModelRegistry.models[architecture].load_model_cls().__name__ == architecture
        print(f"imported {architecture}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
