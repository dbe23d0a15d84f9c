"""What an engine takes of a CPU's memory against what `appliance plan serve` says, awake under full load and asleep.

    python benchmarks/engine_memory.py [--real DIR] [--seqs N] [--json FILE] [--only NAME,...]

Per model: the private memory of the engine's processes (what the host gets back when it ends; pages that it shares with
the warm parent belong to nobody), as `serve.core.sizing` estimates it and as the kernel counts it
(/proc/PID/smaps_rollup) - at the start, after a whole context and a full batch of sampled requests with
log-probabilities, and asleep. The context is the one that the sizing chose.

    tiny    two layers of 128, a vocabulary of 384
    qwen    the shape of Qwen2.5-0.5B with random weights and a tokenizer of as many tokens as it has
    real    a checkpoint directory, for instance DATA_DIR/models/smollm2-135m/v1 (--real)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import at_most, record  # noqa: E402 - the path comes first
from runtime.devices.kinds import kind_of  # noqa: E402
from runtime.processes.kernel import group_pids, held_bytes  # noqa: E402
from serve.core.config import EngineConfig  # noqa: E402
from serve.core.shape import ServedShape  # noqa: E402
from serve.core.sizing import CPU_MAX_NUM_SEQS, asleep_bytes, engine_size  # noqa: E402
from serve.engine.replica import Replica  # noqa: E402
from tests.e2e.engine_support import Box, client  # noqa: E402
from weights.format.layout import Layout  # noqa: E402

QWEN_05B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.02,
}
# A whole context is filled up to here; a longer one would only take longer.
LONGEST_PROMPT = 4000
WITHIN = 0.10


def widen_tokenizer(path: Path, tokens: int) -> None:
    """Give a BPE tokenizer as many tokens as the model has, by merges of merges."""
    body = json.loads((path / "tokenizer.json").read_text())
    vocabulary, merges = body["model"]["vocab"], body["model"]["merges"]
    letters = [t for t in vocabulary if len(t) == 1][:200]
    pairs = [(a, b) for a in letters for b in letters]
    for a, b in [*pairs, *((a + b, c) for a, b in pairs for c in letters)]:
        if len(vocabulary) >= tokens:
            break
        if a + b not in vocabulary and a in vocabulary:
            vocabulary[a + b] = len(vocabulary)
            merges.append([a, b])
    (path / "tokenizer.json").write_text(json.dumps(body))


def private_bytes(pid: int) -> int:
    return sum(map(held_bytes, group_pids(pid)))


async def load(replica_spec: Any, prompt: int) -> None:
    """A prompt of a whole context, and then as many sampled requests at once as the engine runs."""
    sdk = client(replica_spec).with_options(timeout=600)
    ids = [(37 * index) % 300 + 10 for index in range(prompt)]
    await sdk.completions.create(model=replica_spec.model, prompt=ids, max_tokens=2)
    sampled = {"temperature": 1, "top_p": 0.9, "logprobs": 5, "max_tokens": 3, "extra_body": {"ignore_eos": True}}
    await asyncio.gather(
        *(
            sdk.completions.create(model=replica_spec.model, prompt=ids[turn : turn + 48], **sampled)
            for turn in range(replica_spec.max_num_seqs)
        )
    )


async def measure(box: Box, name: str, path: Path, seqs: int, dtype: str, host_bytes: int) -> dict[str, Any]:
    config = EngineConfig(max_num_seqs=seqs)
    about = json.loads((path / "config.json").read_text())
    layout = Layout.read(path)
    shape = ServedShape.from_config(about, layout.nbytes, sum(placed.spec.numel for placed in layout))
    kind = {"task": "generate", "arch": about["architectures"][0]}
    size = engine_size(
        config,
        shape,
        tensor_parallel=1,
        device_kind="cpu",
        device_memory_bytes=host_bytes,
        asleep_per_device=0,
        dtype=dtype,
        **kind,
    )
    settings = {"task": kind["task"], **size.spec_fields()}
    replica = Replica(str(box.warm_socket), str(box.logs))
    started = await replica.start(box.spec(f"{name}-{dtype}", path, **settings))
    try:
        found = {"start": private_bytes(started["pid"])}
        context = size.max_model_len or 512
        await load(box.spec(f"{name}-{dtype}", path, **settings), min(context, LONGEST_PROMPT) - 60)
        found["awake"] = private_bytes(started["pid"])
        await replica.sleep()
        found["asleep"] = private_bytes(started["pid"])
    finally:
        await replica.stop()
    return {
        "context": size.max_model_len,
        "estimate": {"awake": size.memory.device_bytes, "asleep": asleep_bytes(shape), **asdict(size.memory)},
        "measured": found,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| model | dtype | context | estimate, awake | measured | off | estimate, asleep | measured | off |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        model, dtype = name.split()
        cells = [model, dtype, f"{row['context']:,}"]
        for state in ("awake", "asleep"):
            guess, is_ = row["estimate"][state], row["measured"][state]
            cells += [f"{guess / 1e6:,.0f} MB", f"{is_ / 1e6:,.0f} MB", f"{guess / is_ - 1:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    box, rows = Box(), {}
    native = "bfloat16" if kind_of("cpu").computes_bf16() else "float32"
    try:
        made = {"tiny": lambda: box.version("tiny", seed=1, max_position_embeddings=2048)}
        made["qwen"] = lambda: box.version("qwen", "qwen2", seed=2, **QWEN_05B)
        if options.real:
            made["real"] = lambda: Path(shutil.copytree(options.real, box.root / "versions" / "real"))
        for name in options.only.split(",") if options.only else made:
            path = made[name]()
            if name == "qwen":
                widen_tokenizer(path, QWEN_05B["vocab_size"])
            for dtype in (native, "float32") if name == "real" and native != "float32" else (native,):
                rows[f"{name} {dtype}"] = await measure(box, name, path, options.seqs, dtype, 3 * 2**30)
                print(name, dtype, json.dumps(rows[f"{name} {dtype}"]), flush=True)
    finally:
        box.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, help="a checkpoint directory")
    parser.add_argument("--seqs", type=int, default=CPU_MAX_NUM_SEQS, help="requests at once")
    parser.add_argument("--only", default="", help="names, with commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    claims = []
    for name, row in rows.items():
        for state in ("awake", "asleep"):
            off = abs(row["estimate"][state] / row["measured"][state] - 1)
            claims.append(
                at_most(f"estimate of an engine's memory, {state}, off by", name, 100 * off, "%", 100 * WITHIN)
            )
    record(__file__, claims)


if __name__ == "__main__":
    main()
