"""The CUDA build with stub drivers: no warm parent touches CUDA before it forks, engines' command lines become
configurations, and a worker compiles kernels with files of the packages only. Installs 9 GB (six minutes), unless
`.venv-cuda` exists: `make setup VENV=.venv-cuda` with APPLIANCE_BUILD=cuda.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
# Compiles a kernel as humming-kernels does (humming/jit/compiler.py).
COMPILES = """
import subprocess, sys
from runtime.devices.kinds import kind_of
kind_of("cuda").in_worker()
from humming.utils.nvrtc import get_nvrtc_library_path, may_build_nvrtc_compile_binary
source, compiled = sys.argv[1:]
program = [may_build_nvrtc_compile_binary(), "--nvrtc-path", get_nvrtc_library_path()]
flags = ["--input", source, "--output", compiled, "--", "--gpu-architecture=sm_90a"]
subprocess.run([*program, *flags], check=True)
"""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),  # includes the installation
    pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="would use the real driver"),
    pytest.mark.skipif(not (shutil.which("cc") and shutil.which("nm")), reason="builds the stubs with cc and nm"),
]


# --- stub drivers: a `libcuda.so.1` that ends any process that calls it, a `libnvidia-ml.so.1` with eight GPUs

ENDED_WITH = 86
# Functions that touch no device; they return an error.
ANSWERED = ("cuDriverGetVersion", "cuGetErrorString", "cuGetErrorName")
# When it initialises the driver, the CUDA runtime looks up all other functions by cuGetProcAddress.
ALWAYS = ("cuInit", "cuGetProcAddress", "cuGetProcAddress_v2", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain")
CUDA_ERROR_NOT_FOUND = 500


def build(folder: Path, packages: Path) -> None:
    """Write both libraries into `folder`; libcuda has all functions that libraries below `packages` link against."""
    names = sorted(_named(packages) | set(ANSWERED) | set(ALWAYS))
    lines = ["#include <unistd.h>", "#include <string.h>"]
    for name in names:
        if name in ANSWERED:
            lines.append(f"int {name}(void) {{ return {CUDA_ERROR_NOT_FOUND}; }}")
        else:
            text = f"a process that forks called {name}"
            lines.append(f'int {name}(void) {{ write(2, "{text}\\n", {len(text) + 1}); _exit({ENDED_WITH}); }}')
    source = folder / "cuda_stub.c"
    source.write_text("\n".join(lines) + "\n")
    for code, library in ((source, "libcuda.so.1"), (Path(__file__).with_name("nvml_stub.c"), "libnvidia-ml.so.1")):
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / library, code], check=True)


def _named(packages: Path) -> set[str]:
    libraries = [path for path in packages.rglob("*.so*") if path.is_file()]
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=False
    ).stdout
    words = (line.split() for line in listed.splitlines())
    names = (word[-1].split("@")[0] for word in words if len(word) == 2 and word[0] == "U")
    return {name for name in names if name.startswith("cu") and name[2:3].isupper()}


@pytest.fixture(scope="module")
def cuda_python(tmp_path_factory):
    ready = REPOSITORY / ".venv-cuda"
    if not (ready / "bin" / "python").exists():
        ready = tmp_path_factory.mktemp("cuda") / "venv"
        install = [REPOSITORY / "images" / "install.sh", "--venv", ready, "--build", "cuda", "--packages-only"]
        subprocess.run([*install, "--no-compile"], check=True)
    return ready / "bin" / "python"


@pytest.fixture(scope="module")
def stubs(cuda_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drivers")
    build(folder, next(cuda_python.parents[1].glob("lib/python*/site-packages")))
    return folder


@pytest.mark.parametrize("half", ["train", "serve"])
def test_warm_parent_never_initialises_cuda_before_fork(cuda_python, stubs, tmp_path, half):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [cuda_python, "-m", "tests.cuda.closure", half, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    report = done.stdout.splitlines()[-1:]
    assert report, f"the parent ended with {done.returncode}: {done.stderr[-2000:]}"
    # The child's last call proves that the stub is used, and ends it with the stub's exit code.
    assert json.loads(report[0])["child"] == ENDED_WITH, done.stderr[-2000:]
    # Without its setting, humming's import leaves two compilers and their threads in the forking process.
    assert json.loads(report[0])["children"] == 0 and json.loads(report[0])["threads"] == ["MainThread"]
    if half == "serve":
        assert "configured for 1" in done.stderr and "configured for 2" in done.stderr
        assert "imported Qwen3_5ForConditionalGeneration" in done.stderr, done.stderr[-2000:]
        assert not json.loads(report[0])["flashinfer"], "importing it initialises CUDA"


@pytest.mark.skipif(Path("/usr/local/cuda").exists(), reason="would use the installed CUDA")
def test_worker_compiles_quantised_kernels_without_installed_cuda(cuda_python, stubs, tmp_path):
    source, compiled = tmp_path / "kernel.cu", tmp_path / "kernel.cubin"
    source.write_text("__global__ void twice(float* at) { *at *= 2; }")
    caches = {"HUMMING_CACHE_DIR": str(tmp_path / "cache"), "HUMMING_TMP_DIR": str(tmp_path / "tmp")}
    environment = {**os.environ, **caches, "LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([cuda_python, "-c", COMPILES, source, compiled], env=environment, check=True, timeout=300)
    assert compiled.stat().st_size
