"""Finds and watches NVIDIA GPUs through NVML."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml

from runtime.devices.kind import DeviceKind, DevicesRefused, Found, PowerControl, Reading
from runtime.devices.nvml_power import NvmlPower
from runtime.devices.torch_cuda import TorchCuda, device_at_import, started
from runtime.devices.xids import fault_of

LEAST_DRIVER = 580  # of CUDA 13, which the lock's torch and vLLM are built for; images/install.sh asks for it too
LEAST_SHARED_BYTES = 99 * 1024
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024}
"""Shared memory that a block may have, by compute capability (CUDA's programming guide, technical specifications). NVML
does not tell it. Any other has LEAST_SHARED_BYTES."""
LEAST_CAPABILITY = (8, 0)  # of bfloat16 and FlashAttention, in engines and in ranks (vllm/platforms/cuda.py)
NO_ANSWER = "does not answer"
_WATCHED = pynvml.nvmlEventTypeXidCriticalError
_CONTROL = Path("/dev/nvidiactl")
ONE_COMPILER = "HUMMING_DISABLE_PARALLEL_BUILD"
LIBRARY_PATH = "LD_LIBRARY_PATH"
NVRTC_BUILTINS = "nvidia/*/lib/libnvrtc-builtins.so.*"
"""Below a folder of packages."""
_NO_DRIVER = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_NoPermission)
_NOT_REPORTED = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_NoPermission,
    pynvml.NVMLError_InvalidArgument,
    pynvml.NVMLError_FunctionNotFound,  # a newer driver no longer has it, or an older one not yet
)
_THROTTLES = (
    (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, "heat"),
    (pynvml.nvmlClocksThrottleReasonHwSlowdown, "hardware"),
    (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, "power_brake"),
    (pynvml.nvmlClocksThrottleReasonSwPowerCap, "power_cap"),
)
_EXCLUSIVE = {
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive process",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}


class Cuda(TorchCuda):
    name = "cuda"
    title = "NVIDIA GPU"
    context_bytes = 2 * 2**30
    asleep_bytes = 3 * 2**29  # 1.60 GB of them for SmolLM2-135M on an H200, its graphs moved to the host
    # Nothing of vLLM's GPU code yet: some of it (vllm.compilation.backends) imports FlashInfer, whose import asks CUDA
    # for the first GPU (flashinfer/kda_kernels/__init__.py). Only a test on a GPU can show what leaves CUDA alone.
    engine_modules = ()
    # vLLM takes them first on Blackwell, and with keys and values in FP8 on all but Hopper, without asking for the nvcc
    # that compiles their kernels, or the network that they come from (vllm/platforms/cuda.py, _get_backend_priorities).
    compiled_attention = "FLASHINFER"

    def present(self) -> bool:
        return _CONTROL.exists()

    def probe(self) -> tuple[Found, ...]:
        """Reads NUMA node and NVLink peers if the driver reports them (NVML API reference, nvmlDeviceGetP2PStatus).
        Leaves out GPUs that neither engines nor ranks compute on, such as a small one for a screen."""
        try:
            pynvml.nvmlInit()
        except _NO_DRIVER:
            return ()
        except pynvml.NVMLError as error:
            raise DevicesRefused(_broken(error)) from error
        try:
            _check_driver()
            handles = [_handle_or_error(index) for index in range(pynvml.nvmlDeviceGetCount())]
            old = {index: words for index, handle in enumerate(handles) if (words := _too_old(handle))}
            peers = {index: handle for index, handle in enumerate(handles) if index not in old}
            found = [_found(index, peers) for index in peers]
        finally:
            pynvml.nvmlShutdown()
        if old and not found:
            raise DevicesRefused(f"the NVIDIA GPUs of this machine are too old: {next(iter(old.values()))}. {_ON_CPU}")
        if found and not self.present():  # by which every process that computes decides, before it imports anything
            raise DevicesRefused(
                f"NVML names {len(found)} NVIDIA GPUs ({found[0].name}), and there is no {_CONTROL}, as under WSL2, on "
                f"which the box does not run. {_ON_CPU}"
            )
        # One whose memory is not known is taken for one like the others: plans are made for devices that are alike.
        alike_bytes = min((one.memory_bytes for one in found if one.memory_bytes), default=0)
        if found and not alike_bytes:
            raise DevicesRefused(
                f"the driver names {len(found)} NVIDIA GPUs and none of them can be used (the first {found[0].unfit}); "
                f"`nvidia-smi` and `dmesg | grep -i xid` say more. {_ON_CPU}"
            )
        return tuple(one if one.memory_bytes else replace(one, memory_bytes=alike_bytes) for one in found)

    def visibility(self, devices: Iterable[int | str]) -> dict[str, str]:
        # NVML's numbers, not CUDA's default order, which puts the fastest first.
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def watch(self, devices: Mapping[int, str]) -> Callable[[Collection[str]], tuple[Reading, ...]]:
        return _Watch(devices).read

    def power_control(self) -> PowerControl:
        return NvmlPower()

    def not_ready(self, message: str) -> str:
        if "system not yet initialized" not in message:  # error 802 (CUDA driver API, CUDA_ERROR_SYSTEM_NOT_READY)
            return ""
        return (
            "the GPUs of this machine are joined by NVSwitches and cannot be used before nvidia-fabricmanager has set "
            "them up: install it in the driver's very version and start it (`systemctl enable --now "
            "nvidia-fabricmanager`)"
        )

    def foreign(self) -> dict[int, str]:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return {}
        try:
            handles = [_handle_or_error(index) for index in range(pynvml.nvmlDeviceGetCount())]
            processes = {index: _processes(handle) for index, handle in enumerate(handles)}
        finally:
            pynvml.nvmlShutdown()
        return {index: words for index, words in processes.items() if words}

    def fork_environment(self) -> dict[str, str]:
        # Makes torch.cuda.is_available() query NVML instead of CUDA, which no forked process could use afterwards
        # ("Cannot re-initialize CUDA in forked subprocess").
        # The import of humming-kernels starts two compilers in the background, with a thread each that waits for them,
        # in a process that forks, and they outlive it. Whoever uses its kernels compiles them when it needs them
        # (humming/ops/utils.py).
        return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", ONE_COMPILER: "1"}

    def before_fork(self) -> None:
        # DeepSpeed's accelerator keeps NVML open from its import on, and so does every torch.cuda.is_available() that
        # asks NVML, as Triton's import does, by handles on the library of their own. It counts its users for all.
        _close()

    def after_fork(self) -> None:
        # DeepSpeed asks NVML for free memory through the handle on the library that it opened before.
        try:
            pynvml.nvmlInit()
        except _NO_DRIVER:
            return

    def in_worker(self) -> None:
        # It also has kernels compiled one after the other (humming/utils/cpu.py): of a model of 30 MB in 4 bits on an
        # H200 they had not ended after two minutes, with 16 processors of which 15 did nothing.
        os.environ.pop(ONE_COMPILER, None)
        # Each is compiled by a program that loads NVRTC by its path (humming/csrc/nvrtc_compile.cpp). NVRTC then looks
        # for a second library by its name alone, which without an installed CUDA is among the packages, where nobody
        # looks: no kernel could be compiled, and no such engine started.
        found = {str(file.parent) for entry in sys.path for file in Path(entry).glob(NVRTC_BUILTINS)}
        if found:
            own = os.environ.pop(LIBRARY_PATH, "")
            os.environ[LIBRARY_PATH] = ":".join(filter(None, (own, *sorted(found))))

    def library_environment(self, caches: Path) -> dict[str, str]:
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_CACHE_PATH": str(caches / "cuda"),
            "FLASHINFER_WORKSPACE_BASE": str(caches),
            # Multiplies layers of few bits on Hopper, by kernels that it compiles with NVRTC (humming-kernels).
            "HUMMING_CACHE_DIR": str(caches / "humming"),
            "HUMMING_TMP_DIR": str(caches / "humming-tmp"),
        }

    def device_at_import(self, device: Callable[[], tuple[tuple[int, int], str]]) -> AbstractContextManager[None]:
        # The kernels of gated delta nets (Qwen3.5) ask, and vLLM's front end imports them with the class of a model
        # that reads pictures before it forks its core (vllm/third_party/flash_linear_attention/ops/utils.py).
        if started():
            return nullcontext()
        capability, name = device()
        return device_at_import(capability, name, SHARED_BYTES.get(capability, LEAST_SHARED_BYTES))

    def engine_arguments(self) -> list[str]:
        # FlashInfer compiles its kernels by nvcc when an engine starts: minutes, and without nvcc the engine dies. If
        # nvcc and ninja are installed, vLLM also imports it for the fusion before it forks its core, and that
        # initialises CUDA, which no forked worker can then use (vllm/config/vllm.py, utils/flashinfer.py). Every level
        # of optimisation leaves alone what is said here. Prompts of models with gated delta nets (Qwen3-Next, Qwen3.5)
        # go through it from Hopper on, whether or not there is an nvcc (vllm/model_executor/layers/mamba/gdn).
        passes = {"pass_config": {"fuse_allreduce_rms": False}}
        without_tuning = ["--no-enable-flashinfer-autotune", "--compilation-config", json.dumps(passes)]
        return [*super().engine_arguments(), *without_tuning, "--gdn-prefill-backend", "triton"]

    def engine_environment(self) -> dict[str, str]:
        # For the same reason. vLLM's own Triton kernel samples, its own all-reduce and NCCL join the devices, its
        # compiled CUTLASS or Marlin kernels or Triton's multiply in FP8. The first two would be used without asking
        # for nvcc, and so would DeepGEMM, which compiles every kernel by it: of layers quantised to FP8 in blocks, from
        # Hopper on, where vLLM prefers it because it comes in vLLM's own package (vllm/utils/deep_gemm.py).
        return {
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
            "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
            "VLLM_USE_DEEP_GEMM": "0",
        }


KIND: DeviceKind = Cuda()
_ON_CPU = (
    "To run on logical CPU devices meanwhile, install the CPU build (APPLIANCE_BUILD=cpu) and set [box] devices to a "
    "number, such as 8."
)


def _broken(error: pynvml.NVMLError) -> str:
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        return (
            "the NVIDIA driver in the kernel and its library libnvidia-ml are of different versions, as after an "
            f"update without a reboot: reboot, or reload the kernel module (`rmmod nvidia_uvm nvidia && modprobe "
            f"nvidia`). {_ON_CPU}"
        )
    return f"NVML, the NVIDIA driver's library, does not start ({error}); `nvidia-smi` says more. {_ON_CPU}"


def _close() -> None:
    """Close every GPU that this process opened through NVML, by whichever handle on the library."""
    try:
        pynvml.nvmlInit()  # without it pynvml says that nothing is open
    except pynvml.NVMLError:
        return
    while True:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:  # NVML counts its users; this was the last one
            return


def _check_driver() -> None:
    version = _text(pynvml.nvmlSystemGetDriverVersion())
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < LEAST_DRIVER:
        raise DevicesRefused(
            f"NVIDIA driver {version} is too old: the CUDA 13 libraries of this build need {LEAST_DRIVER} or newer, "
            f"and every engine and rank would end at its start. Update the driver (Debian, Ubuntu: `apt-get install "
            f"nvidia-driver-{LEAST_DRIVER}`). {_ON_CPU}"
        )


def _handle_or_error(index: int) -> Any:
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return error


def _too_old(handle: Any) -> str:
    """Why engines and ranks do not compute on this GPU, whatever is set; "" if they do."""
    if isinstance(handle, pynvml.NVMLError):
        return ""
    try:
        capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        if capability >= LEAST_CAPABILITY:
            return ""
        least, its = (".".join(map(str, one)) for one in (LEAST_CAPABILITY, capability))
        return (
            f"{_text(pynvml.nvmlDeviceGetName(handle))} is of compute capability {its}, and the box computes in "
            f"bfloat16 and with FlashAttention, which begin with {least} (Ampere)"
        )
    except pynvml.NVMLError:  # it does not answer, which what is found of it says
        return ""


def _found(index: int, handles: Mapping[int, Any]) -> Found:
    handle = handles[index]
    if isinstance(handle, pynvml.NVMLError):
        return Found(index, "NVIDIA GPU", 0, unfit=f"{NO_ANSWER} ({handle})")
    try:
        reason = unfit(handle)
        return Found(
            index=index,
            name=_text(pynvml.nvmlDeviceGetName(handle)),
            memory_bytes=_memory_bytes(handle, known_unfit=bool(reason)),
            numa_node=numa_node(handle),
            linked=frozenset(n for n, other in handles.items() if n != index and _linked(handle, other)),
            uuid=_uuid(handle),
            unfit=reason,
        )
    except pynvml.NVMLError as error:
        return Found(index, "NVIDIA GPU", 0, unfit=f"{NO_ANSWER} ({error})")


def _memory_bytes(handle: Any, known_unfit: bool) -> int:
    if not known_unfit:
        return _usable_bytes(handle)
    # The driver tells the memory of a GPU that is cut by MIG to root alone (NVML API, nvmlDeviceGetMemoryInfo).
    return _ask(lambda: _usable_bytes(handle)) or 0


def _usable_bytes(handle: Any) -> int:
    """What CUDA hands out. Driver and firmware keep some hundreds of MB of NVML's total, which nvidia-smi shows (NVML
    API, nvmlMemory_v2_t)."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    except pynvml.NVMLError_NotSupported:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return int(memory.total) - int(memory.reserved)


def unfit(handle: Any) -> str:
    """Why a GPU that answers must not be used; "" if it may be."""
    mig = _ask(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    if mig and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
        return "is cut by MIG, which the box does not use; `nvidia-smi -i N -mig 0` makes it whole"
    mode = _ask(lambda: pynvml.nvmlDeviceGetComputeMode(handle))
    if mode in _EXCLUSIVE:
        return (
            f"is in compute mode {_EXCLUSIVE[mode]}, in which an engine cannot sleep next to another; "
            "`nvidia-smi -i N -c DEFAULT` changes that"
        )
    return ""


def _processes(handle: Any) -> str:
    if isinstance(handle, pynvml.NVMLError):
        return ""
    try:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        used_bytes = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    except pynvml.NVMLError:
        return ""
    if not found:
        return ""
    shown = ", ".join(str(process.pid) for process in found[:4]) + (", …" if len(found) > 4 else "")
    return (
        f"is used by {len(found)} other process{'es' * (len(found) > 1)} (pid {shown}), {used_bytes / 1e9:.1f} GB of "
        "its memory are taken: engines and ranks there will not find what was planned for them"
    )


def _text(raw: str | bytes) -> str:
    return raw if isinstance(raw, str) else raw.decode()


def _uuid(handle: Any) -> str:
    return _text(_ask(lambda: pynvml.nvmlDeviceGetUUID(handle)) or "")


def numa_node(handle: Any) -> int | None:
    bus = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]  # its domain has 8 digits, that of sysfs 4
    try:
        number = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return number if number >= 0 else None


def _linked(handle: Any, other: Any) -> bool:
    """Whether NVLink joins two GPUs, directly or through an NVSwitch. (With a switch, the remote address of a link
    names the switch and no GPU.)"""
    if isinstance(other, pynvml.NVMLError):
        return False
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return False
    return status == pynvml.NVML_P2P_STATUS_OK


def _ask(question: Callable[[], Any]) -> Any:
    """None if this kind of GPU does not report it."""
    try:
        return question()
    except _NOT_REPORTED:
        return None


class _Watch:
    """Reads on demand. The driver collects Xids (`xids`) from the first `read` on, of each GPU that answers then.

    A GPU whose handle was asked for stays open until NVML is closed, and the driver resets no GPU that a process has
    open, not even for monitoring (nvidia-smi, --gpu-reset). So letting one go means to close NVML and open it again.
    """

    def __init__(self, devices: Mapping[int, str]):
        self._devices = dict(devices)
        self._watched: tuple[int, ...] = ()  # indices of the GPUs whose Xids the driver collects in `_events`
        self._events: Any = None
        self._xids: dict[int, Counter[int]] = {index: Counter() for index in self._devices}

    def read(self, let_go: Collection[str]) -> tuple[Reading, ...]:
        """One reading of each GPU except those to let go, which are given by id."""
        kept = tuple(index for index, device_id in self._devices.items() if device_id not in let_go)
        faults = {} if self._events is None else self._new_faults()
        if self._events is None or kept != self._watched:
            self._open(kept)
        return tuple(self._reading(index, faults.get(index, ())) for index in kept)

    def _open(self, indices: tuple[int, ...]) -> None:
        if self._events is not None:
            events, self._events = self._events, None
            pynvml.nvmlEventSetFree(events)
            _close()
        pynvml.nvmlInit()
        events = pynvml.nvmlEventSetCreate()
        for index in indices:
            self._register(index, events)
        self._watched, self._events = indices, events

    @staticmethod
    def _register(index: int, events: Any) -> None:
        try:
            pynvml.nvmlDeviceRegisterEvents(_handle(index), _WATCHED, events)
        except pynvml.NVMLError:  # not reported by this GPU, or it is lost: its reading says so
            return

    def _new_faults(self) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError:  # usually the timeout: there is no other event
                return found
            try:
                index = pynvml.nvmlDeviceGetIndex(event.device)
            except pynvml.NVMLError:  # the GPU fell off the bus with this Xid: its reading says that it is lost
                continue
            xid = int(event.eventData)
            self._xids[index][xid] += 1
            if fault := fault_of(xid):
                found[index] = (*found.get(index, ()), fault)

    def _reading(self, index: int, faults: tuple[str, ...]) -> Reading:
        device_id, now_s = self._devices[index], time.time()
        try:
            handle = _handle(index)
            reading = self._answered(handle, device_id, now_s, faults)
        except pynvml.NVMLError as error:
            reading = Reading(device_id, now_s, faults, lost=str(error))
        return replace(reading, driver_errors=tuple(self._xids[index].items()))

    @staticmethod
    def _answered(handle: Any, device_id: str, now_s: float, faults: tuple[str, ...]) -> Reading:
        remap_failed = (_ask(lambda: pynvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0))[3]
        return Reading(
            device_id,
            now_s,
            (*faults, "could not remap a row of its memory") if remap_failed else faults,
            ecc_uncorrected=_ask(
                lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                    handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
                )
            ),
            temperature_c=(heat := _heat(handle)),
            slowdown_c=_slowdown(handle, heat),
            unfit=unfit(handle),
            uuid=_uuid(handle),
            **_meters(handle),
        )


def _heat(handle: Any) -> int | None:
    """The temperature in °C. Drivers of CUDA 14 only answer the second call (nvidia-ml-py, about the first)."""
    heat = _ask(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    return _ask(lambda: pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)) if heat is None else heat


def _slowdown(handle: Any, heat: int | None) -> int | None:
    """The temperature in °C at which the GPU slows down. From Ada and Hopper on, a GPU may only tell how far it is from
    its limit, and how far beyond the limit it slows down (NVML API, nvmlDeviceGetTemperatureThreshold; "T.Limit" in
    nvidia-smi)."""
    threshold: int | None = _ask(
        lambda: pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    )
    if threshold or heat is None:
        return threshold
    margin = _ask(lambda: pynvml.nvmlDeviceGetMarginTemperature(handle))
    fields = _ask(lambda: pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT]))
    if margin is None or not fields or fields[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return heat + margin - int(fields[0].value.siVal)


def _meters(handle: Any) -> dict[str, Any]:
    """What the GPU draws and does now, in base units. A value that NVML does not tell, for whatever reason, is None: a
    meter that fails does not make a GPU count as lost."""

    def ask(question: Callable[..., Any], *more: Any) -> Any:
        try:
            return question(handle, *more)
        except pynvml.NVMLError:
            return None

    def scaled(value: Any, by: float) -> float | None:
        return None if value is None else value * by

    busy, memory = ask(pynvml.nvmlDeviceGetUtilizationRates), ask(pynvml.nvmlDeviceGetMemoryInfo)
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    return {
        "power_w": scaled(ask(pynvml.nvmlDeviceGetPowerUsage), 1e-3),
        "power_limit_w": scaled(ask(pynvml.nvmlDeviceGetEnforcedPowerLimit), 1e-3),
        "energy_j": scaled(ask(pynvml.nvmlDeviceGetTotalEnergyConsumption), 1e-3),
        "busy": None if busy is None else busy.gpu * 1e-2,
        "memory_used_bytes": None if memory is None else int(memory.used),
        "clock_hz": scaled(ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM), 1e6),
        "throttled": tuple(word for bits, word in _THROTTLES if reasons & bits),
    }


def _handle(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)
