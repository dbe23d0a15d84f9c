"""Makes tiny random models and a byte-level tokenizer with a ChatML template, in a second, for training tests."""

import gzip
import json
import os
import random
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.model_sizes import sizes
from train.data.chat import ChatEncoder
from train.data.formats import convert

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if message.get('tool_calls') %}{% for call in message['tool_calls'] %}"
    "<tool>{{ call['function'] | tojson }}</tool>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 384
FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),  # biases on q, k and v
    "qwen3": ("Qwen3", {}),  # norms on q and k
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 52}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 52,
            "shared_expert_intermediate_size": 60,
        },
    ),
}


TEXT = ["the quick brown fox jumps over the lazy dog and says hello to everyone", "1 + 2 = 3, how many are left"]
SPECIAL = {"pad_token": "<|pad|>", "bos_token": None, "eos_token": "<|im_end|>"}


def tokenizer(
    template: str = CHATML,
    tokens: Sequence[str] = ("<|pad|>", "<|im_start|>", "<|im_end|>"),
    special: dict[str, str | None] = SPECIAL,
    text: Sequence[str] = TEXT,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `text`. tokens: special tokens, numbered from 0. special: tokens by role."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **special)


def make_model_dir(
    path: Path,
    *,
    family: str = "llama",
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    words: PreTrainedTokenizerFast | None = None,
    **config,
) -> Path:
    """A random model in a Hugging Face directory. Odd sizes on purpose: partitions then cut through parameters."""
    torch.manual_seed(seed)
    words = words or tokenizer()
    settings = sizes(48, 100, 2, 4, 2, vocab_size=max(len(words), VOCABULARY), max_position_embeddings=512)
    settings |= {"tie_word_embeddings": tied, "initializer_range": 0.1}
    settings |= {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("eos", "pad", "bos")}
    name, more = FAMILIES[family]
    settings = getattr(transformers, f"{name}Config")(**(settings | more | config))
    made = getattr(transformers, f"{name}ForCausalLM")(settings)
    made.to(dtype).save_pretrained(path)
    words.save_pretrained(path)
    return path


def _writer(record_of: Callable[[random.Random, int, int, int], Any]) -> Callable[..., Path]:
    """Make a writer of files of records about the sum of two numbers below 100.

    record_of: (random source, record number, both numbers) -> record, in the form of a checked file."""

    @wraps(record_of)
    def write(path: Path, n_examples: int, *, seed: int = 0) -> Path:
        draw = random.Random(seed)
        with open(path, "w") as file:
            for number in range(n_examples):
                record = record_of(draw, number, draw.randrange(100), draw.randrange(100))
                file.write(json.dumps(record) + "\n")
        return path

    return write


@_writer
def write_chat_file(draw: random.Random, _: int, a: int, b: int) -> Any:
    """Short chats of different lengths about sums."""
    question = {"role": "user", "content": f"how many are {a} and {b}{' please' * draw.randrange(8)}"}
    answer = f"{a} and {b} are {a + b}" + "!" * draw.randrange(4)
    return {"messages": [question, {"role": "assistant", "content": answer}]}


@_writer
def write_text_file(draw: random.Random, _: int, a: int, b: int) -> Any:
    """Documents of sums, some longer than a row."""
    return {"text": f"{a} and {b} are {a + b}\n" * draw.choice((1, 3, 12))}


@_writer
def write_pair_file(draw: random.Random, _: int, a: int, b: int) -> Any:
    """Pairs of a correct and a wrong sum."""
    wrong = a + b + draw.choice((-2, -1, 1, 2))
    prompt = f"how many are {a} and {b}{' please' * draw.randrange(4)}"
    rejected = f"{a} and {b} are {wrong}" + "!" * draw.randrange(4)
    return convert({"prompt": prompt, "chosen": f"{a} and {b} are {a + b}", "rejected": rejected}).record


@_writer
def write_marked_file(_: random.Random, number: int, a: int, b: int) -> Any:
    """Marked sums, one in four wrong."""
    good = number % 4 != 0
    record = {"prompt": f"how many are {a} and {b}", "completion": f"{a + b + (not good)}", "label": good}
    return convert(record).record


@_writer
def write_prompt_file(draw: random.Random, _: int, a: int, b: int) -> Any:
    """Prompts for sums, with the answer for a grader."""
    question = f"how many are {a} and {b}{' please' * draw.randrange(4)}"
    return convert({"messages": [{"role": "user", "content": question}], "answer": str(a + b)}).record


def trained_texts(encoder: ChatEncoder, example: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs (all text before, trained text) of each run of trained tokens, row by row."""
    decode, found = encoder.tokenizer.decode, []
    for ids, mask in encoder.encode(example):
        assert len(ids) == len(mask)
        runs = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        found += [(decode(ids[:start]), decode(ids[start:end])) for start, end in runs]
    return found


def log_probs_of(model: torch.nn.Module, sequence: tuple[np.ndarray, np.ndarray]) -> torch.Tensor:
    """Log-probability of each trained token of a sequence (ids, loss mask), from the model's logits."""
    ids, learnt = (torch.from_numpy(part) for part in sequence)
    logits = model(ids.long()[None], segments=((0, len(ids)),)).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[1:, None].long())[:, 0][learnt[1:]]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of the model and reset them."""
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    return found


def shared_data() -> Path:
    """Directory of real data sets; skip the test if it is absent."""
    root = Path(os.environ.get("APPLIANCE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not root.is_dir():
        pytest.skip(f"no data sets at {root}; set APPLIANCE_TEST_DATA")
    return root


def gsm8k(path: Path, split: str, n_examples: int) -> Path:
    """Write the first examples of GSM8K in its published form (question, answer)."""
    with gzip.open(shared_data() / "finetune" / f"gsm8k_{split}.jsonl.gz", "rt") as source:
        lines = [line for line, _ in zip(source, range(n_examples), strict=False)]
    path.write_text("".join(lines))
    return path
