"""Builds stub drivers: a `libcuda.so.1` that ends any process that calls it, and a `libnvidia-ml.so.1` with eight GPUs.

`build(folder, packages)`: the stub of CUDA has the functions that the libraries below `packages` name, since they link
against them. Needs `cc` and `nm`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ENDED_WITH = 86
# They touch no device, and answer an error.
ANSWERED = ("cuDriverGetVersion", "cuGetErrorString", "cuGetErrorName")
# The CUDA runtime finds all others through cuGetProcAddress, when it initialises the driver.
ALWAYS = ("cuInit", "cuGetProcAddress", "cuGetProcAddress_v2", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain")
CUDA_ERROR_NOT_FOUND = 500


def build(folder: Path, packages: Path) -> None:
    """Write both libraries into `folder`."""
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
    for code, library in ((source, "libcuda.so.1"), (HERE / "nvml_stub.c", "libnvidia-ml.so.1")):
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / library, code], check=True)


def _named(packages: Path) -> set[str]:
    libraries = [path for path in packages.rglob("*.so*") if path.is_file()]
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=False
    ).stdout
    words = (line.split() for line in listed.splitlines())
    names = (word[-1].split("@")[0] for word in words if len(word) == 2 and word[0] == "U")
    return {name for name in names if name.startswith("cu") and name[2:3].isupper()}
