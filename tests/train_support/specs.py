"""Specs of jobs for unit tests of what ranks do, and tokens of their data."""

import json
from pathlib import Path
from typing import Any

from train.data.token_set import TokenWriter
from train.data_checks.process import encoder_of
from train.methods.methods import method_of
from train.plan.spec import TrainSpec


def tokenised(data: Path, base: Path, method: str = "supervised") -> Path:
    """A job's data file, of which the tokens are written as the check of the data does."""
    encoder = encoder_of(base)
    with TokenWriter(data) as writer, open(data) as lines:
        for record in map(json.loads, lines):
            writer.add(record, method_of(method).encode(encoder, record))
        writer.finish(encoder, base)
    return data


def host_spec(base: object = "", **fields: Any) -> TrainSpec:
    """Spec of a CPU job on the model in `base`; other fields are empty unless passed."""
    nowhere = {"train_path": "", "run_dir": "", "shm_root": "", "output_model": "o"}
    return TrainSpec(**({"job_id": "j", "base_path": str(base), "device_kind": "cpu"} | nowhere | fields))
