"""Runs TRL's trainers, for comparison with the box's trainer.

TRL is not a dependency of the box: pip installs it once into a folder under build/peers that shares torch and
transformers with the environment of the box.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# dill treats modules outside a folder with this name as user code.
FOLDER = Path(__file__).resolve().parents[1] / "build" / "peers" / "trl" / "site-packages"
PACKAGES = "trl==1.16.0 datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 multiprocess==0.70.19 dill==0.4.1 xxhash==4.1.0"
COMMON = {
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def install() -> None:
    if not FOLDER.is_dir():
        unfinished = FOLDER.with_name("unfinished")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]
        subprocess.run([*command, str(unfinished), *PACKAGES.split()], check=True)
        unfinished.rename(FOLDER)


def in_new_process(work: Callable[..., Any], *arguments: Any, threads: int) -> Any:
    """Run `work` in a new interpreter with `threads` threads for matrix products; return its result."""
    os.environ.update(OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    os.environ.update(CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def now() -> tuple[float, float]:
    """Return the wall time, and the CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    wall_s, cpu_s = now()
    return wall_s - began[0], cpu_s - began[1]


def supervised(folder: Path, steps: int, batch: int, length: int, packed: bool, bf16: bool, low: bool) -> Any:
    """Run SFTTrainer; return (wall s, CPU s) and real tokens of each step. low: whether the model is in bf16."""
    sys.path.insert(0, str(FOLDER))
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    times: list[tuple[float, float]] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # the library has no types
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(since(self.began))

    class Counted(SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            tokens.append(int(inputs["input_ids"].numel() if mask is None else mask.sum()))
            return super().training_step(model, inputs, *args, **kwargs)

    rows = load_dataset("json", data_files=str(folder / "chat.jsonl"), split="train", cache_dir=str(folder / "cache"))
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=batch,
        max_steps=steps,
        max_length=length,
        packing=packed,
        bf16=bf16,
        learning_rate=1e-4,
        assistant_only_loss=True,
        logging_strategy="no",
        optim="adamw_torch",
        model_init_kwargs={"dtype": torch.bfloat16 if low else torch.float32},
        **COMMON,
    )
    Counted(model=str(folder / "model"), args=config, train_dataset=rows, callbacks=[Clock()]).train()
    return times, tokens


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return the reward that the grader in tests/e2e/test_box_rewards.py gives."""
    texts = [completion[0]["content"] for completion in completions]
    pairs = zip(texts, answer, strict=True)
    return [0.8 * max(0.0, 1 - len(text) / 48) + 0.2 * (right in text) for text, right in pairs]


def grpo(
    model: str, rows: list[Any], steps: int, prompts: int, tokens: int, group: int, rank: int, rate: float, seed: int
):
    """Run GRPOTrainer; return (wall s, mean reward, mean answer tokens, CPU s) by step, times since the start."""
    sys.path.insert(0, str(FOLDER))
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    found: list[tuple[float, float, float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = now()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "reward" in logs:
                wall_s, cpu_s = since(self.began)
                found.append((wall_s, logs["reward"], logs["completions/mean_length"], cpu_s))

    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Clock()],
            peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
            args=GRPOConfig(
                output_dir=folder,
                model_init_kwargs={"dtype": "float32"},
                per_device_train_batch_size=group * prompts,
                num_generations=group,
                max_completion_length=tokens,
                max_steps=steps,
                shuffle_dataset=False,
                temperature=1.0,
                # As in our trainer: one update per sample, advantages minus their mean, equal weight for all tokens.
                loss_type="dapo",
                scale_rewards="none",
                beta=0.0,
                epsilon=0.2,
                epsilon_high=0.28,
                learning_rate=rate,
                lr_scheduler_type="cosine_with_min_lr",
                lr_scheduler_kwargs={"min_lr_rate": 0.1},
                warmup_steps=math.ceil(0.03 * steps),
                adam_beta2=0.95,
                weight_decay=0.0,
                max_grad_norm=1.0,
                bf16=False,
                logging_steps=1,
                seed=seed,
                **COMMON,
            ),
        ).train()
    return found
