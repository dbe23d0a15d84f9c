"""Compares training speed with TRL's SFTTrainer: same model, data, threads and effective batch, in turns.

    python -m benchmarks.train_speed [--size 25M] [--threads 1] [--steps 8] [--sides ours trl trl-bf16-packed]

Both fine-tune the same random Llama on GSM8K (assistant tokens only) with AdamW, in bf16, or in fp32 if the CPU would
emulate bf16 (forty times slower). Our trainer runs as in the product: DeepSpeed ZeRO-1, fp32 master weights and
accumulation, packing. TRL runs its SFTTrainer as documented, or with the model in bf16 and its own packing ("bfd").
Tokens exclude padding and the first two steps. Ratios use tokens per CPU second, which other load affects little; with
one thread, this equals the speed on an idle machine.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._claims import parser, record, stated
from benchmarks._machine import SIZES, native_dtype
from benchmarks._trl import in_new_process, install, now, since, supervised
from tests.starter import DEMO_DATA, make_starter
from train.data_checks.process import checked

MAX_LENGTH, EXAMPLE_TOKENS, WARM_STEPS = 512, 200, 2
SIDES = ("ours", "trl", "trl-bf16-packed")


def prepare(folder: Path, size: str) -> None:
    """Write a random Llama of this size, with the starter's tokenizer, and the data."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_starter(folder / "model", steps=0, seed=0)
    config = AutoConfig.from_pretrained(folder / "model", **(SIZES[size] | {"vocab_size": 4096}))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    how = {"chat_path": folder / "chat.jsonl", "method": "supervised", "tokenizer": folder / "model"}
    assert checked(DEMO_DATA / "gsm8k_train.jsonl", **how).ok


def ours(
    folder: Path, steps: int, batch: int, micro: int, precision: str
) -> tuple[list[tuple[float, float]], list[int]]:
    """Train with our trainer; return (wall s, CPU s) and real tokens of each step."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    from train.control.rank import Progress
    from train.plan.spec import TrainSpec
    from train.trainer.engine import init_world, meeting_url
    from train.trainer.worker import prepare

    init_world("cpu", meeting_url(folder / f"meeting-{os.getpid()}"))
    spec = TrainSpec(
        job_id="bench",
        base_path=str(folder / "model"),
        train_path=str(folder / "chat.jsonl"),
        run_dir=str(folder / "run"),
        shm_root=str(folder / "store"),
        output_model="ft:bench",
        max_length=MAX_LENGTH,
        batch_size=batch,
        micro_batch=micro,
        learning_rate=1e-4,
        zero_stage=1,
        n_epochs=4,
        precision=precision,
        device_kind="cpu",
    )
    tokens: list[int] = []

    def note(event: str, **data: Any) -> None:
        if event == "metrics":
            tokens.append(data["tokens"])

    run, times = prepare(spec, note, Progress()), []
    for _ in range(steps):
        began = now()
        run.train_step()
        times.append(since(began))
    return times, tokens


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--size", choices=SIZES, default="25M")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--steps", type=int, default=8, help="optimizer steps; results exclude the first two")
    options.add_argument("--batch", type=int, default=4, help="packed sequences of 512 tokens per step (ours)")
    options.add_argument("--micro", type=int, default=1, help="packed sequences per forward pass (ours)")
    options.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 if the CPU has it, else fp32")
    options.add_argument("--rounds", type=int, default=1, help="the sides take turns; results are medians")
    options.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    given = options.parse_args()
    precision = given.precision or ("bf16" if native_dtype() == "bfloat16" else "fp32")
    if set(given.sides) != {"ours"}:
        install()
    rates: dict[str, list[float]] = {side: [] for side in given.sides}
    for _ in range(given.rounds):
        for side in given.sides:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
                prepare(folder := Path(name), given.size)
                if side == "ours":
                    work, rest = ours, (given.batch, given.micro, precision)
                else:
                    packed = side == "trl-bf16-packed"
                    # Use as many real tokens per optimizer step as our trainer.
                    batch = given.batch if packed else round(given.batch * MAX_LENGTH / EXAMPLE_TOKENS)
                    work, rest = supervised, (batch, MAX_LENGTH, packed, precision == "bf16", packed)
                times, tokens = in_new_process(work, folder, given.steps, *rest, threads=given.threads)
            wall_s, cpu_s = (sum(column) for column in zip(*times[WARM_STEPS:], strict=True))
            counted = sum(tokens[WARM_STEPS:])
            rates[side].append(counted / cpu_s)
            print(f"{side}: {counted / wall_s:.0f} tokens/s, {counted / cpu_s:.0f} per CPU second", flush=True)
    size, medians = f"{given.size}, {precision}", {side: statistics.median(found) for side, found in rates.items()}
    rows = [stated(f"training: tokens per CPU second, {side}", size, rate, "/s") for side, rate in medians.items()]
    for side in medians.keys() - {"ours"} if "ours" in medians else ():
        ratio = medians["ours"] / medians[side]
        rows.append(stated(f"training: tokens per CPU second over {side}", size, ratio, "x"))
    record(__file__, rows)


if __name__ == "__main__":
    main()
