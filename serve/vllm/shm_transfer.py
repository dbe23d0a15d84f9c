"""Implements backend `shm` of vLLM's weight-transfer framework (vllm/distributed/weight_transfer).

One `update_weights` call loads one whole version from its directory in shared memory. Two ways, chosen per call:

    in-place    layer by layer, freeing each old layer first (serve.load.direct_load), with up to one thread per core
    layerwise   vLLM's own reload, for models whose layout the recorded plan cannot describe (serve.load.layerwise_load)

Rules
- A version is checked against the recorded plan before the first byte of the model changes (`check`).
- An error once loading has begun leaves a model of mixed weights: `dirty` stays set and only another whole load
  clears it. The engine stays paused until then.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from runtime.devices.kinds import of_torch
from serve.core.errors import WrongState
from serve.load.direct_load import DirectLoader
from serve.load.first_pass import follow_first_pass
from serve.load.layerwise_load import load_layerwise
from serve.load.load_plan import LoadPlan
from serve.load.shm_source import ToLock, VersionSource
from serve.vllm.loose_tensors import LooseTensors, spans_of_weights
from serve.vllm.shm_loader import PLAN_ATTRIBUTE

STAGING_NICENESS = 10  # added to the engine's own
LOAD_THREADS = 8  # they share the memory's rate: more would add little


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """No rendezvous needed: the version's directory is the whole protocol."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """`path`: the version directory. `layerwise` forces vLLM's own reload even if the faster way is possible."""

    path: str
    layerwise: bool = False


@dataclass
class Staging:
    """A version that a low-priority thread maps; `done` once that has ended."""

    path: str
    source: VersionSource | None = None
    thread: threading.Thread | None = None
    error: Exception | None = None
    done: bool = False

    def close(self) -> None:
        """Unmap the version. Call it only after the thread has ended."""
        if self.source is not None:
            self.source.close()


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Lives in each worker beside its model."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        plan = getattr(model, PLAN_ATTRIBUTE, None)
        if plan is None:
            raise WrongState("weight transfer backend shm needs a model loaded with --load-format shm")
        self.plan: LoadPlan = plan
        self._kind = of_torch(device)
        plan.follow_first_load(model, on_host=self._kind.on_host)
        self.dirty = False
        self.report: dict[str, Any] = {}
        world_size = vllm_config.parallel_config.world_size
        cores = len(os.sched_getaffinity(0)) // world_size
        self._direct = DirectLoader(model, plan, device, threads=max(1, min(cores, LOAD_THREADS)))
        self._staging: Staging | None = None
        self._loaded: VersionSource | None = None
        self._closing: threading.Thread | None = None
        self._loose = None if self._kind.on_host else LooseTensors(model)
        compiled = vllm_config.compilation_config.mode != CompilationMode.NONE
        self.layerwise_reason = self._direct.refusal
        if self.layerwise_reason is None and self._kind.on_host and compiled:
            self.layerwise_reason = "compiled graphs hold the packed weights of the first load"

    # -- before a pause ------------------------------------------------------------------------------------

    def check(self, path: str) -> dict[str, Any]:
        """Compare a version with the model. Raises a VersionError; changes nothing."""
        source = VersionSource(path)
        try:
            self.plan.check(source)
            return {
                "bytes": source.nbytes,
                "bytes_read": self._bytes_read(source),
                "layerwise_reason": self.layerwise_reason,
                "alike": self.plan.alike,
            }
        finally:
            source.close()

    def stage(self, path: str) -> None:
        """Begin to prepare `path` in the background; poll `staged`. The next update to that path uses it.

        This also faults in its pages, and on a GPU locks them, because both take time.
        """
        self.drop_staged()
        staging = self._staging = Staging(path)
        staging.thread = threading.Thread(target=self._stage, args=(staging,), name="stage", daemon=True)
        staging.thread.start()

    def staged(self) -> bool:
        """Whether the staged version is complete. Re-raises errors of the building thread."""
        staging = self._staging
        if staging is None:
            raise WrongState("no version is being staged")
        if staging.error is not None:
            self.drop_staged()
            raise staging.error
        return staging.done

    def drop_staged(self) -> None:
        """Discard a staged version and free its memory, after its thread has stopped."""
        self.unmap()
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.thread.join()
            staging.close()

    # -- vLLM's protocol -----------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to do: there is no peer."""

    def start_weight_update(self) -> None:
        """Nothing to do here: one `update_weights` brings the whole version. After a sleep, this first puts back what
        lay beside the weights."""
        if self._loose is not None:
            self._loose.put_back()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load the version at `update_info.path`. Raises VersionError with the model unchanged, or any error of the
        load itself with `dirty` set."""
        staging = self._staging
        mapped = staging is not None and staging.path == update_info.path and staging.done
        reason = self.layerwise_reason or ("asked for" if update_info.layerwise else None)
        started_s = time.perf_counter()
        # vLLM's loaders get a private mapping: in a shared one no copy may cross from one locked piece into the next.
        if mapped and (reason is None or self.layerwise_reason is not None):
            source, staging.source = staging.source, None
        else:
            # Requests wait, and locking would take longer than it saves.
            source = self._open(update_info.path, layerwise=reason is not None, lock=False)
        self.drop_staged()
        self._loaded = source
        mapped_s = time.perf_counter()
        self.dirty = True
        if reason is None:
            self._direct.load(source)
        else:
            load_layerwise(self.model, self.model_config, source, self.device)
            if self._loose is not None:
                self._loose.follow(self.model)
        follow_first_pass(self.model)
        self.dirty = False
        self.report = {
            "how": "in-place" if reason is None else "layerwise",
            "bytes_read": self._bytes_read(source),
            "map_s": mapped_s - started_s,
            "load_s": time.perf_counter() - mapped_s,
        }

    def finish_weight_update(self) -> None:
        """Nothing left to do: `receive_weights` returned with the weights in place."""

    def sleeping(self, runner: Any) -> None:
        """Keep what vLLM's model runner holds in the memory of the weights, which is about to be discarded."""
        if self._loose is not None:
            self._loose.keep(spans_of_weights(), runner)

    def unmap(self) -> None:
        """Unmap what a load read. Call it after the engine resumed, because unlocking and unmapping take time; they go
        on in a thread."""
        self._wait_for_closing()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._closing = threading.Thread(target=self._close, args=(loaded,), name="unmap", daemon=True)
            self._closing.start()

    def shutdown(self) -> None:
        self.drop_staged()
        self._wait_for_closing()

    # --------------------------------------------------------------------------------------------------------

    def _wait_for_closing(self) -> None:
        closing, self._closing = self._closing, None
        if closing is not None:
            closing.join()

    def _close(self, source: VersionSource) -> None:
        _give_way()
        self._kind.use(self.device)
        source.close()

    def _open(self, path: str, *, layerwise: bool, lock: bool = True) -> VersionSource:
        source = VersionSource(path)
        try:
            self.plan.check(source)
            # vLLM's loaders may write into their input, so they get a private mapping.
            if layerwise:
                return source.map()
            lock = lock and self._kind.locks_pages
            to_lock = ToLock(self.plan.copied_spans(source), self._kind.page_lock()) if lock else None
            return source.map(to_lock, self.plan.read_spans(source) if self.plan.complete else None)
        except BaseException:
            source.close()
            raise

    def _bytes_read(self, source: VersionSource) -> int:
        return self.plan.bytes_read(source) if self.plan.complete else source.nbytes

    def _stage(self, staging: Staging) -> None:
        _give_way()
        # A new thread uses the first GPU: locking pages from it would leave a context of every tensor parallel worker
        # there, half a gigabyte each.
        self._kind.use(self.device)
        try:
            staging.source = self._open(staging.path, layerwise=self.layerwise_reason is not None)
            if self.layerwise_reason is None and self._kind.on_host:
                self._direct.make_room()
        except Exception as error:  # noqa: BLE001 - carried to `staged`, which raises it
            staging.error = error
            return
        staging.done = True


def _give_way() -> None:
    """Lower this thread's priority below the engine's steps."""
    me = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, me, min(os.getpriority(os.PRIO_PROCESS, me) + STAGING_NICENESS, 19))
