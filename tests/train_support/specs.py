"""Job specs for tests of ranks."""

from typing import Any

from train.plan.spec import TrainSpec


def host_spec(base: object = "", **fields: Any) -> TrainSpec:
    """Spec of a CPU job on the model in `base`; other fields are empty unless passed."""
    nowhere = {"train_path": "", "run_dir": "", "shm_root": "", "output_model": "o"}
    return TrainSpec(**({"job_id": "j", "base_path": str(base), "device_kind": "cpu"} | nowhere | fields))
