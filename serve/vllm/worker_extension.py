"""Methods that every worker gets (vLLM's `--worker-extension-cls`), called over `collective_rpc`."""

from __future__ import annotations

from typing import Any

from serve.core.errors import VersionError, WrongState
from serve.vllm.shm_transfer import ShmWeightTransferEngine


class ShmWorkerExtension:
    """Mixed into vLLM's worker class; `weight_transfer_engine` is the worker's own attribute."""

    weight_transfer_engine: ShmWeightTransferEngine
    model_runner: Any

    def shm_check(self, path: str) -> dict[str, Any]:
        """Check whether and how a version can be loaded: see ShmWeightTransferEngine.check.

        vLLM carries only the text of a worker's exception, so a refusal travels as `{"refused": [type, text]}`.
        """
        try:
            return self.weight_transfer_engine.check(path)
        except VersionError as error:
            return {"refused": [type(error).__name__, str(error)]}

    def shm_stage(self, path: str, build: bool) -> None:
        self.weight_transfer_engine.stage(path, build)

    def shm_staged(self) -> bool:
        return self.weight_transfer_engine.staged()

    def shm_record_fingerprint_pass(self) -> None:
        """Record the model runner's next pass, which is the fingerprint, so that `shm_advance_fingerprint` can repeat
        it."""
        self.weight_transfer_engine.watch(self.model_runner)

    def shm_ready_fingerprint(self) -> dict[str, Any] | None:
        return self.weight_transfer_engine.ready_fingerprint()

    def shm_advance_fingerprint(self) -> dict[str, Any] | None:
        return self.weight_transfer_engine.advance_fingerprint()

    def shm_drop_staged(self) -> None:
        self.weight_transfer_engine.drop_staged()

    def shm_release_retired(self) -> None:
        self.weight_transfer_engine.release_retired()

    def shm_report(self) -> dict[str, Any]:
        """Report on the last load. Raises WrongState if it did not complete."""
        if self.weight_transfer_engine.dirty:
            raise WrongState("the last load did not complete; the model holds mixed weights")
        return self.weight_transfer_engine.report

    def shm_adapters(self) -> dict[str, Any]:
        """Return how many LoRA adapters are loaded, and the number and seconds of loads since the start."""
        manager = self.model_runner.lora_manager
        return {
            "resident": len(manager.list_adapters()),
            "loads": manager.shm_loads,
            "load_s": manager.shm_load_s,
        }
