"""Imports modules in the warm parent of training, so that a forked rank starts in well under a second.

It must start no OpenMP work (a forked child would hang in the thread pool) and must not touch CUDA.
"""

from __future__ import annotations

import os

from runtime.devices import kinds

# The libraries below read these variables at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without these variables, DeepSpeed and transformers query CUDA, and torch then refuses CUDA in every forked rank.
for name, value in kinds.FORK_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("DS_ACCELERATOR", kinds.present().name)

# Imported inside deepspeed.init_distributed and deepspeed.initialize.
import deepspeed.comm.mori  # noqa: E402, F401
import deepspeed.module_inject.auto_ep_layer  # noqa: E402, F401
import deepspeed.runtime.zero.stage3  # noqa: E402, F401
import numpy.ma  # noqa: E402, F401

# transformers resolves these by name when a model of the family is loaded.
import transformers.models.auto.modeling_auto  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402, F401
import transformers.models.mistral.modeling_mistral  # noqa: E402, F401
import transformers.models.mixtral.modeling_mixtral  # noqa: E402, F401
import transformers.models.qwen2.modeling_qwen2  # noqa: E402, F401
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

import train.trainer.worker  # noqa: E402, F401

get_checkpoint_conversion_mapping("llama")  # compiles 700 regular expressions once for all ranks
