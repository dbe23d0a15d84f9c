"""GRPO by TRL, for `grpo_trl.py`, which starts it with TRL on its path: what is asked as JSON on stdin, and
[seconds since training began, mean reward of the step, mean tokens of its answers, seconds of CPU since this process
began] of each step as JSON in the file that it names, which is there from the first step on."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TQDM_DISABLE="1", CUDA_VISIBLE_DEVICES="")


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """As the grader of tests/e2e/test_box_rewards.py."""
    found = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion[0]["content"]
        found.append(0.8 * max(0.0, 1 - len(text) / 48) + 0.2 * (right in text))
    return found


def main() -> None:
    asked = json.load(sys.stdin)
    import torch

    torch.set_num_threads(asked["threads"])
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps: list[list[float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # the library has no types
        began_s = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began_s = time.monotonic()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "reward" in logs:
                ended_s, length = time.monotonic() - self.began_s, logs["completions/mean_length"]
                steps.append([ended_s, logs["reward"], length, time.process_time()])
                Path(asked["out"]).write_text(json.dumps(steps))

    group, prompts = asked["group"], asked["prompts"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=asked["model"],
            processing_class=AutoTokenizer.from_pretrained(asked["model"]),
            reward_funcs=reward,
            train_dataset=Dataset.from_list(asked["rows"]),
            callbacks=[Clock()],
            peft_config=LoraConfig(
                r=asked["rank"], lora_alpha=2 * asked["rank"], target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            args=GRPOConfig(
                output_dir=folder,
                model_init_kwargs={"dtype": "float32"},
                per_device_train_batch_size=group * prompts,
                num_generations=group,
                max_completion_length=asked["tokens"],
                max_steps=asked["steps"],
                shuffle_dataset=False,
                temperature=1.0,
                # One update for each sample, advantages less their mean, all tokens of the step alike: as ours.
                loss_type="dapo",
                scale_rewards="none",
                beta=0.0,
                epsilon=0.2,
                epsilon_high=0.28,
                learning_rate=asked["rate"],
                lr_scheduler_type="cosine_with_min_lr",
                lr_scheduler_kwargs={"min_lr_rate": 0.1},
                warmup_steps=math.ceil(0.03 * asked["steps"]),
                adam_beta2=0.95,
                weight_decay=0.0,
                max_grad_norm=1.0,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=asked["seed"],
            ),
        )
        trainer.train()


if __name__ == "__main__":
    main()
