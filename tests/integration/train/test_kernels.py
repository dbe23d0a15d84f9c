"""Liger's fused kernels compared with torch's operations."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import PretrainedConfig

from train.model.model import LIGER_FAMILIES, use_liger
from train.plan.errors import UnsupportedModel


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="Triton is not installed")
def test_liger_gradients_match_torch():
    command = [sys.executable, "-m", "tests.train_support.interpreted_kernels"]
    told = subprocess.check_output(command, env={**os.environ, "TRITON_INTERPRET": "1"}, text=True)
    errors = json.loads(told.splitlines()[-1])
    assert errors.keys() == set(LIGER_FAMILIES)
    assert all(0 < error < 1e-5 for error in errors.values()), errors


def test_liger_unknown_family_is_rejected():
    model = torch.nn.Module()
    model.config = PretrainedConfig()
    with pytest.raises(UnsupportedModel, match="liger"):
        use_liger(model)
