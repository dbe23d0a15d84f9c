"""Training speed against TRL's SFTTrainer: same model, data, threads and effective batch, one after the other.

    python benchmarks/train_speed.py [--size 25m] [--threads 1] [--steps 8] [--trl-path DIR] [--json FILE]

Both fine-tune the same random Llama on GSM8K (assistant tokens only) with AdamW, in bf16, or in fp32 where the CPU
would emulate bf16 (forty times slower). Ours runs as the product: DeepSpeed ZeRO-1, fp32 master weights and
accumulation, packing. TRL runs its SFTTrainer three ways: as documented, with the model in bf16 too, and with its own
packing on top ("bfd"); in fp32 the second is the first. Sides alternate over `--rounds`; medians reported. Tokens are
real ones, not padding, of the steps after the first two. Ratios and shares are made of tokens per CPU second, which
other work on the machine disturbs little; with one thread that is the speed of an idle machine. The matrix rate is
measured before and after every run, in the same type; the share of it is 6 * parameters * tokens/s over that rate.

TRL is no dependency of the box: it is installed under build/peers at the first run, unless --trl-path says where it is.
Needs GSM8K under ../shared/data or $APPLIANCE_TEST_DATA.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _peers

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}"
    "<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {  # hidden, intermediate, layers, heads, kv heads
    "5m": (192, 512, 6, 6, 3),
    "25m": (384, 1024, 10, 6, 3),
    "50m": (512, 1408, 12, 8, 4),
    "110m": (768, 2048, 12, 12, 6),
}
VOCABULARY, MAX_LENGTH, WARM_STEPS = 8192, 512, 2
SIDES = ("ours", "trl", "trl-bf16", "trl-bf16-packed")


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it clears up as after Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps, the first two are not counted")
    parser.add_argument("--batch", type=int, default=4, help="packed sequences of 512 tokens per step of ours")
    parser.add_argument("--micro", type=int, default=1, help="of them in one forward pass of ours")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 where the CPU has it")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--trl-path", help="directory TRL was installed into with --target")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--run-side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_side:
        return _run_side(options)
    if options.precision is None:
        import torch

        options.precision = "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"
    print(f"{options.size}, {options.precision}, {options.steps} steps a side", flush=True)
    if options.trl_path is None and options.sides != ["ours"]:
        try:
            options.trl_path = str(_peers.path("trl"))
        except _peers.NotInstalled as error:
            print(error, flush=True)

    data = Path(os.environ.get("APPLIANCE_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    source = data / "finetune" / "gsm8k_train.jsonl.gz"
    if not source.exists():
        print(f"no GSM8K at {source}; set APPLIANCE_TEST_DATA", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        facts = _prepare(Path(folder), source, options)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
        for _ in range(options.rounds):
            for side in options.sides:
                result = _spawn(side, folder, options)
                if result is not None:
                    runs[side].append(result)
                    print(
                        f"{side:16s} {result['tokens_per_s']:8.0f} tokens/s, "
                        f"{result['tokens_per_cpu_s']:.0f} per CPU second, {result['share_of_matrix_rate']:.0%} "
                        f"of {result['matrix_tflops']:.3f} TFLOP/s",
                        flush=True,
                    )
    return _report(runs, facts, options)


def _report(runs: dict, facts: dict, options: argparse.Namespace) -> int:
    table = {
        side: {key: statistics.median(run[key] for run in results) for key in results[0]}
        for side, results in runs.items()
        if results
    }
    ratios = {
        side: table["ours"]["tokens_per_cpu_s"] / row["tokens_per_cpu_s"]
        for side, row in table.items()
        if side != "ours" and "ours" in table
    }
    result = {
        "benchmark": "train_speed",
        **facts,
        "precision": options.precision,
        "threads": options.threads,
        "sides": table,
        "ours_over": ratios,
    }
    for side, ratio in ratios.items():
        print(f"ours over {side}: {ratio:.2f}x")
    if "ours" in table:
        import _claims

        rate = _claims.stated(
            f"training: share of the matrix rate in {options.precision}",
            options.size,
            100 * table["ours"]["share_of_matrix_rate"],
            "%",
        )
        peers = [
            _claims.stated(f"training: tokens per CPU second over {side}", options.size, ratio, "x")
            for side, ratio in ratios.items()
        ]
        _claims.record(__file__, [rate, *peers])
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if table else 1


def _spawn(side: str, folder: str, options: argparse.Namespace) -> dict[str, Any] | None:
    threads = str(options.threads)
    path = [str(REPOSITORY)] + ([options.trl_path] if options.trl_path and side != "ours" else [])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path),
    }
    own = ["--run-side", side, "--folder", folder, "--precision", options.precision]
    command = [sys.executable, __file__, *sys.argv[1:], *own]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 3:
        print(f"{side}: TRL is not installed here (see --help); skipped", flush=True)
        return None
    if done.returncode != 0:
        print(f"{side} failed:\n{done.stderr[-3000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def _prepare(folder: Path, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rows = [json.loads(line) for line in gzip.open(source, "rt")]
    # TRL tokenises in step with training, ours beforehand: only what a run needs, so that neither waits for it.
    needed = 4 * options.steps * options.batch * MAX_LENGTH // 180
    with open(folder / "chat.jsonl", "w") as out:
        for row in rows[:needed]:
            messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            out.write(json.dumps({"messages": messages}) + "\n")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        (f"{row['question']} {row['answer']}" for row in rows),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    ).save_pretrained(folder / "model")
    hidden, intermediate, layers, heads, kv_heads = SIZES[options.size]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=2048,
            eos_token_id=2,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    model.bfloat16().save_pretrained(folder / "model")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "cpu": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _run_side(options: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(options.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    before = _matrix_rate(torch, dtype)
    if options.run_side == "ours":
        times, tokens, parameters = _ours(options)
    else:
        try:
            import trl  # noqa: F401
        except ImportError:
            return 3
        times, tokens, parameters = _trl(options)
    rate = max(before, _matrix_rate(torch, dtype))
    wall_s, cpu_s = (sum(column) for column in zip(*times[WARM_STEPS:], strict=True))
    counted = sum(tokens[WARM_STEPS:])
    share = 6 * parameters * counted / cpu_s / rate
    print(
        json.dumps(
            {
                "tokens_per_s": counted / wall_s,
                "tokens_per_cpu_s": counted / cpu_s,
                "share_of_matrix_rate": share,
                "matrix_tflops": rate / 1e12,
                "tokens_per_step": statistics.mean(tokens),
            }
        )
    )
    return 0


def _ours(options: argparse.Namespace) -> tuple[list[tuple[float, float]], list[int], int]:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    from train.control.progress import ControlSignals, Progress
    from train.plan.spec import TrainSpec
    from train.trainer.engine import init_world, meeting_url
    from train.trainer.prepare import prepare

    folder = Path(options.folder)
    init_world("cpu", meeting_url(folder / f"meeting-{os.getpid()}"))
    spec = TrainSpec(
        job_id="bench",
        base_path=str(folder / "model"),
        train_path=str(folder / "chat.jsonl"),
        run_dir=str(folder / "run"),
        shm_root=str(folder / "store"),
        output_model="ft:bench",
        max_length=MAX_LENGTH,
        batch_size=options.batch,
        micro_batch=options.micro,
        learning_rate=1e-4,
        zero_stage=1,
        n_epochs=4,
        precision=options.precision,
        device_kind="cpu",
    )
    events: list[dict[str, Any]] = []
    run = prepare(spec, lambda event, **data: events.append({"event": event, **data}), ControlSignals(), Progress())
    times = []
    for _ in range(options.steps):
        started = _now()
        run.feed.ready(run.step)
        run.train_step()
        times.append(_since(started))
    tokens = [event["tokens"] for event in events if event["event"] == "metrics"]
    return times, tokens, sum(p.numel() for p in run.engine.module.parameters())


def _trl(options: argparse.Namespace) -> tuple[list[tuple[float, float]], list[int], int]:
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    folder = Path(options.folder)
    rows = load_dataset("json", data_files=str(folder / "chat.jsonl"), split="train", cache_dir=str(folder / "cache"))
    packed = options.run_side.endswith("packed")
    bf16 = options.precision == "bf16"
    low = bf16 and "bf16" in options.run_side
    # As many real tokens per optimizer step as ours: a mean example has about 180.
    batch = options.batch if packed else round(options.batch * MAX_LENGTH / 180)
    config = SFTConfig(
        output_dir=str(folder / options.run_side),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        max_steps=options.steps,
        max_length=MAX_LENGTH,
        packing=packed,
        use_cpu=True,
        bf16=bf16,
        report_to=[],
        learning_rate=1e-4,
        assistant_only_loss=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        dataloader_num_workers=0,
        optim="adamw_torch",
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.bfloat16 if low else torch.float32},
    )

    class Clock(TrainerCallback):
        times: list[tuple[float, float]] = []
        started = (0.0, 0.0)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = _now()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(_since(self.started))

    class Counted(SFTTrainer):
        tokens: list[int] = []

        def training_step(self, model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            self.tokens.append(int(inputs["input_ids"].numel() if mask is None else mask.sum()))
            return super().training_step(model, inputs, *args, **kwargs)

    clock = Clock()
    trainer = Counted(model=str(folder / "model"), args=config, train_dataset=rows, callbacks=[clock])
    trainer.train()
    return clock.times, Counted.tokens, sum(p.numel() for p in trainer.model.parameters())


def _matrix_rate(torch: Any, dtype: Any) -> float:
    """Best matrix product of square sizes, floating-point operations per CPU second."""
    best = 0.0
    for n in (512, 1024, 2048):
        a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
        a @ b
        for _ in range(3):
            started = _now()
            a @ b
            best = max(best, 2 * n**3 / _since(started)[1])
    return best


def _now() -> tuple[float, float]:
    """Wall and CPU seconds (of all threads of this process)."""
    return time.perf_counter(), time.process_time()


def _since(started: tuple[float, float]) -> tuple[float, float]:
    wall_s, cpu_s = _now()
    return wall_s - started[0], cpu_s - started[1]


if __name__ == "__main__":
    sys.exit(main())
