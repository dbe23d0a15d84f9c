"""Specs of jobs for unit tests of what ranks do."""

from typing import Any

from train.plan.spec import TrainSpec


def host_spec(base: object = "", **fields: Any) -> TrainSpec:
    """A job on processors that starts from the model in `base`; what a test does not name is empty."""
    nowhere = {"train_path": "", "run_dir": "", "shm_root": "", "output_model": "o"}
    return TrainSpec(**({"job_id": "j", "base_path": str(base), "device_kind": "cpu"} | nowhere | fields))
