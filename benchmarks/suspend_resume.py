"""Suspend and resume of a training world against DeepSpeed's checkpoint through disk and a process restart.

    python benchmarks/suspend_resume.py [--size 25m] [--ranks 4] [--resume-ranks 2] [--disk DIR] [--json FILE]

Ours: `Group.suspend` on a training world (to the step boundary, snapshot into shared memory, processes gone), then a
new world forked from the warm parent on another number of ranks, until its first step is done. Theirs: the same model
and engine, `save_checkpoint` to `--disk`, then new Python processes on the same number of ranks (DeepSpeed cannot load
at another without a conversion), `load_checkpoint`, until the first step is done. The memcpy time of the state's bytes
is measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

SIZES = {"5m": (192, 512, 6, 6, 3), "25m": (384, 1024, 10, 6, 3), "50m": (512, 1408, 12, 8, 4)}
VOCABULARY = 8192


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--resume-ranks", type=int, default=2)
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="directory on a disk for DeepSpeed's checkpoint")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--rank-of", choices=("save", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return _baseline_rank(options)

    shm = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="bench-", dir=options.disk))
    try:
        spec = _prepare(shm, disk, options)
        ours = asyncio.run(_ours(spec, shm, options))
        theirs = _theirs(spec, disk, options)
        copy_s = _memcpy_s(ours["bytes"])
    finally:
        shutil.rmtree(shm)
        shutil.rmtree(disk)
    result = {
        "benchmark": "suspend_resume", "size": options.size, "zero": options.zero, "ranks": options.ranks,
        "resume_ranks": options.resume_ranks, "date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(), "memcpy_s": copy_s, "ours": ours, "deepspeed": theirs,
        "speedup": theirs["total_s"] / ours["total_s"], "snapshot_over_memcpy": ours["snapshot_s"] / copy_s,
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


async def _ours(spec: Any, shm: Path, options: argparse.Namespace) -> dict[str, float]:
    from train.group import Group, Watch
    from train.rank_host import RankHost

    socket = shm / "warm.sock"
    parent = subprocess.Popen(
        [sys.executable, "-m", "runtime.warm_parent", "--socket", str(socket), "--preload", "train.preload",
         "--log", str(shm / "warm.log")], cwd=REPOSITORY,
    )  # fmt: skip
    watch = Watch(ping_timeout_s=60.0)
    stepped = asyncio.Event()

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "metrics":
            stepped.set()

    try:
        while not socket.exists():
            assert parent.poll() is None, (shm / "warm.log").read_text()
            await asyncio.sleep(0.05)
        group = Group(note, watch)
        hosts = [RankHost(str(socket), str(shm / "logs")) for _ in range(options.ranks)]
        await group.start(spec, hosts, ["cpu"] * len(hosts))
        await stepped.wait()
        report = await group.suspend()
        assert report is not None
        stepped.clear()
        started = time.monotonic()
        again = Group(note, watch)
        hosts = hosts[: options.resume_ranks]
        await again.start(spec, hosts, ["cpu"] * len(hosts), report.snapshot_path)
        ready_s = time.monotonic() - started
        await stepped.wait()
        resume_s = time.monotonic() - started
        await again.kill()
    finally:
        parent.terminate()
        parent.wait()
    suspend_s = report.seconds["snapshot"] + report.seconds["exit"]
    return {"bytes": report.bytes, "snapshot_s": report.seconds["snapshot"], "exit_s": report.seconds["exit"],
            "suspend_s": suspend_s, "ready_s": ready_s, "next_step_s": resume_s,
            "total_s": suspend_s + resume_s}  # fmt: skip


def _theirs(spec: Any, disk: Path, options: argparse.Namespace) -> dict[str, float]:
    from train.group import free_port

    found: dict[str, float] = {}
    for part in ("save", "load"):
        port = free_port()
        started = time.time()
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank-of", part, "--spec", spec.to_json(), "--disk", str(disk)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(options.ranks), "LOCAL_RANK": "0",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
                     "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(options.ranks)
        ]  # fmt: skip
        outputs = [rank.communicate()[0] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), f"the {part} world failed"
        told = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
        found |= {f"{part}_s": max(t["seconds"] for t in told)}
        if part == "load":
            found["restart_to_next_step_s"] = max(t["stepped_at"] for t in told) - started
    return found | {"total_s": found["save_s"] + found["restart_to_next_step_s"]}


def _baseline_rank(options: argparse.Namespace) -> int:
    from train.engine import init_world
    from train.loop import Progress, Wishes, prepare
    from train.spec import TrainSpec

    spec = TrainSpec.from_json(options.spec)
    init_world("cpu")
    run = prepare(spec, lambda event, **data: None, Wishes(), Progress())
    folder = str(Path(options.disk) / "checkpoint")
    if options.rank_of == "save":
        run._one_step(run.plan.total_steps)
        started = time.perf_counter()
        run.engine.save_checkpoint(folder)
        os.sync()
        seconds = time.perf_counter() - started
    else:
        started = time.perf_counter()
        run.engine.load_checkpoint(folder)
        seconds = time.perf_counter() - started
        run._one_step(run.plan.total_steps)
    print(json.dumps({"seconds": seconds, "stepped_at": time.time()}), flush=True)
    return 0


def _prepare(shm: Path, disk: Path, options: argparse.Namespace) -> Any:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from train.spec import TrainSpec

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|pad|>", "<|end|>", *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|end|>", pad_token="<|pad|>",
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>\n{% endfor %}",
    ).save_pretrained(shm / "model")  # fmt: skip
    hidden, intermediate, layers, heads, kv_heads = SIZES[options.size]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=2048,
    ))  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(shm / "model")
    with open(shm / "chat.jsonl", "w") as file:
        for number in range(4000):
            answer = " ".join(map(str, range(number % 60))) + " done"
            messages = [{"role": "user", "content": f"count to {number}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return TrainSpec(
        job_id="bench", base_path=str(shm / "model"), train_path=str(shm / "chat.jsonl"), run_dir=str(disk / "run"),
        shm_root=str(shm / "store"), output_model="ft:bench", max_length=128, batch_size=options.ranks,
        zero_stage=options.zero, snapshot_every_s=0.0, n_epochs=50,
    )  # fmt: skip


def _memcpy_s(nbytes: int) -> float:
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    sys.exit(main())
