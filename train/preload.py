"""What the warm parent of training imports, so that a forked rank starts in well under a second.

Imports only: no OpenMP work (a forked child would hang in its thread pool) and no CUDA.
"""

from __future__ import annotations

import os
from pathlib import Path

# Read by the libraries below when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
from deepspeed.ops.op_builder.all_ops import ALL_OPS  # noqa: E402

# DeepSpeed would compile C++ on first use (shm_comm 30 s, CPUAdam 90 s); torch has what we need of it.
deepspeed.ops.__dict__["__compatible_ops__"] = dict.fromkeys(ALL_OPS, False)

# Imported by DeepSpeed inside deepspeed.initialize, where it costs 6 s: it loads dynamo and inductor.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401
import deepspeed.runtime.zero.stage3  # noqa: E402, F401

# transformers resolves these by name when a model of the family is loaded.
import transformers.models.auto.modeling_auto  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402, F401
import transformers.models.mistral.modeling_mistral  # noqa: E402, F401
import transformers.models.mixtral.modeling_mixtral  # noqa: E402, F401
import transformers.models.qwen2.modeling_qwen2  # noqa: E402, F401
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401

import train.worker  # noqa: E402, F401
