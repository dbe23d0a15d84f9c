"""Finds and watches AMD GPUs through the files of the amdgpu driver.

Written by reading; nothing here has run on such a machine. Sources: Linux, Documentation/gpu/amdgpu (files of a card,
RAS counters) and drivers/gpu/drm/amd/amdkfd/kfd_topology.c (nodes, links); HIP numbers devices in the order of KFD's
nodes. vLLM 0.32's platforms/rocm.py: torch's device type is "cuda", RCCL is "nccl" there, CUDA_VISIBLE_DEVICES must
agree with HIP_VISIBLE_DEVICES. The driver's files are enough here, but libraries need the package amdsmi: without it
vLLM takes the machine for one without GPUs (vllm/platforms/__init__.py), and torch.cuda.is_available() in the warm
parents asks HIP, which then works in no fork (torch/cuda/__init__.py, _device_count_amdsmi).
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.devices.kind import DeviceKind, Found, Reading
from runtime.devices.torch_cuda import TorchCuda

SYS = Path("/sys")
_CONTROL = Path("/dev/kfd")
_NODES = Path("class/kfd/kfd/topology/nodes")
_XGMI = 11  # HSA_IOLINK_TYPE_XGMI, KFD's name for direct links between GPUs
LEAST_BYTES = 4 * 2**30  # of its own memory; a processor's built-in graphics has less, and is not a device of a box


class Rocm(TorchCuda):
    name = "rocm"
    title = "AMD GPU"
    hip = True
    context_bytes = 2 * 2**30
    asleep_bytes = 3 * 2**29
    runtime_library = "libamdhip64"
    runtime_prefix = "hip"
    untried = (
        "support for AMD GPUs (ROCm) was written by reading and has never run, and there is no lock of ROCm builds of "
        "torch and vLLM: images/requirements/ has cpu.txt and cuda.txt, whose torch computes on no AMD GPU"
    )

    def present(self) -> bool:
        # On a CPU build of torch such a GPU is of no use, and the processes compute on the host.
        return _CONTROL.exists() and "rocm" in importlib.metadata.version("torch") and bool(self.probe())

    def probe(self) -> tuple[Found, ...]:
        gpus = _gpus()
        numbers = {gpu.node: index for index, gpu in enumerate(gpus)}
        return tuple(_found(numbers[gpu.node], gpu, numbers) for gpu in gpus if gpu.memory_bytes >= LEAST_BYTES)

    def visibility(self, devices: Iterable[int | str]) -> dict[str, str]:
        shown = ",".join(map(str, devices))
        return {"HIP_VISIBLE_DEVICES": shown, "CUDA_VISIBLE_DEVICES": shown}

    def watch(self, devices: Mapping[int, str]) -> Callable[[Collection[str]], tuple[Reading, ...]]:
        def read(let_go: Collection[str]) -> tuple[Reading, ...]:
            gpus = _gpus()
            return tuple(
                _reading(gpus[index], device_id)
                if index < len(gpus)
                else Reading(device_id, time.time(), lost="the driver lists it no longer")
                for index, device_id in devices.items()
                if device_id not in let_go
            )

        return read

    def library_environment(self, caches: Path) -> dict[str, str]:
        return {"MIOPEN_USER_DB_PATH": str(caches / "miopen"), "MIOPEN_CUSTOM_CACHE_DIR": str(caches / "miopen")}


KIND: DeviceKind = Rocm()


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A node of KFD's topology that is a GPU. `card`: its PCI device's folder."""

    node: int
    name: str
    uuid: str
    memory_bytes: int
    card: Path
    linked: frozenset[int]


def _gpus() -> list[_Gpu]:
    """In the order of KFD's nodes, by which HIP numbers them. Processors are nodes too; their gpu_id is 0."""
    folders = sorted((SYS / _NODES).glob("[0-9]*"), key=lambda folder: int(folder.name))
    return [_gpu(folder) for folder in folders if _text(folder / "gpu_id") not in ("", "0")]


def _gpu(folder: Path) -> _Gpu:
    told = _properties(folder / "properties")
    banks = (_properties(bank) for bank in folder.glob("mem_banks/*/properties"))
    links = (_properties(link) for link in folder.glob("io_links/*/properties"))
    card = SYS / "class" / "drm" / f"renderD{told.get('drm_render_minor', -1)}" / "device"
    unique = told.get("unique_id", 0)
    return _Gpu(
        node=int(folder.name),
        name=_text(card / "product_name") or f"AMD {_text(folder / 'name') or 'GPU'}",
        uuid=f"{unique:016x}" if unique else "",
        # Heaps 1 and 2 are the device's own memory, public and private to it.
        memory_bytes=sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in (1, 2)),
        card=card,
        linked=frozenset(link["node_to"] for link in links if link.get("type") == _XGMI and "node_to" in link),
    )


def _found(index: int, gpu: _Gpu, numbers: Mapping[int, int]) -> Found:
    numa = _number(gpu.card / "numa_node")
    return Found(
        index=index,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        numa_node=numa if numa is not None and numa >= 0 else None,
        linked=frozenset(numbers[node] for node in gpu.linked if node in numbers),
        uuid=gpu.uuid,
    )


def _reading(gpu: _Gpu, device_id: str) -> Reading:
    sensors = next(iter(sorted(gpu.card.glob("hwmon/hwmon*"))), gpu.card)
    temperature, critical = _number(sensors / "temp2_input"), _number(sensors / "temp2_crit")  # 2: the hottest point
    watts, limit = (_number(sensors / "power1_average"), _number(sensors / "power1_cap"))  # of microwatts
    busy, clock = _number(gpu.card / "gpu_busy_percent"), _number(sensors / "freq1_input")
    return Reading(
        device_id,
        time.time(),
        ecc_uncorrected=_uncorrected(_text(gpu.card / "ras" / "umc_err_count")),
        temperature_c=None if temperature is None else temperature // 1000,
        slowdown_c=None if critical is None else critical // 1000,
        lost="" if gpu.card.exists() else "its card has left the bus",
        uuid=gpu.uuid,
        power_w=None if watts is None else watts / 1e6,
        power_limit_w=None if limit is None else limit / 1e6,
        busy=None if busy is None else busy / 100,
        memory_used_bytes=_number(gpu.card / "mem_info_vram_used"),
        clock_hz=None if clock is None else float(clock),
    )


def _uncorrected(counts: str) -> int | None:
    """From lines "ue: 0" (uncorrected) and "ce: 0" (corrected)."""
    for line in counts.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "ue" and value.strip().isdigit():
            return int(value)
    return None


def _properties(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # a card without this file, or one that is gone
        return ""
