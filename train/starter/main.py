"""Makes the `starter` model: a small, honestly labelled Llama checkpoint, pretrained here and now.

    python -m train.starter.main --out DIR [--minutes 1.5 | --steps N] [--seed 0] [--threads N] ...

An air-gapped box has no hub to download a first model from; with this one everything runs. Progress goes to
stdout as one JSON object per line: `{"event": "progress", "stage", "fraction", "step", "loss", "tokens_per_s"}`
and at the end `{"event": "done", "path", "steps", "tokens", "parameters", "validation_loss", "seconds"}`.

With `--steps` the same seed, kind of machine and `--threads` give the same bytes. With `--minutes` the learning-rate
schedule follows the clock, so the machine's speed decides the number of steps (at least `least_steps`); the model card
records it.
The directory appears under its name only when complete.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.optim import _muon

from runtime.devices import kinds
from runtime.devices.cpu import HOST_MEMORY
from runtime.processes.kernel import die_with_parent
from runtime.processes.oom import DiesAs, dies_as
from train.starter.model import Shape, StarterNet
from train.starter.text import documents
from train.starter.tokenizer import END_OF_TEXT, TURN_END, render, tokenizer_config, train_tokenizer

LENGTH, BATCH = 256, 8
TIMED_ROWS = 2  # with all rows of a batch, choosing the threads took as long as the first six steps
MUON_RATE, ADAM_RATE, WARMUP = 0.02, 0.008, 0.03
TOKENIZER_DOCUMENTS, HELD_OUT_BATCHES = 5_000, 4
# The least steps of `--minutes`. An idle 2-core machine makes about 150 steps a minute. A busy one takes longer,
# instead of making a model that has learned nothing: after 35 steps it only stammers, after 200 it speaks in sentences.
MIN_STEPS, MIN_STEPS_PER_MINUTE = 10, 120
# Validation documents come from another stream; the offset keeps it apart from the training stream of any small seed.
VALIDATION_SEED_OFFSET = 1_000_003


def batches(tokenizer: Tokenizer, seed: int, *, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (tokens, targets), both (BATCH, LENGTH) int64: documents one after another, cut at fixed length."""
    stream, buffer, need = documents(seed), [], BATCH * LENGTH + 1
    while True:
        while len(buffer) < need:
            texts = [render(document) for document in itertools.islice(stream, 256)]
            buffer.extend(itertools.chain.from_iterable(e.ids for e in tokenizer.encode_batch(texts)))
        window = torch.tensor(buffer[:need], device=device)
        del buffer[: need - 1]
        yield window[:-1].view(BATCH, LENGTH), window[1:].view(BATCH, LENGTH)


def optimizers(net: StarterNet) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, output and norms.

    Muon (Jordan 2024, in torch.optim since 2.9) reaches in 60 s here what AdamW alone reaches in about 110 s.
    """
    if net.compute_dtype != torch.bfloat16:
        _muon._zeropower_via_newtonschulz = orthogonal
    inner = [p for name, p in net.named_parameters() if p.dim() == 2 and ".layers." in name]
    chosen = {id(p) for p in inner}
    outer = [p for p in net.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(inner, lr=MUON_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(outer, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def orthogonal(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float
) -> torch.Tensor:
    """Muon's Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon/) in the gradient's own precision.

    torch does it in bfloat16, which took 7 of 8 seconds of a step on a processor that emulates bfloat16.
    """
    a, b, c = coefficients
    tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.T if tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def rate_scale(progress: float) -> float:
    """Learning-rate factor at `progress` in [0, 1]: short warm-up, then straight down to 2 %."""
    return min(1.0, progress / WARMUP + 0.02, 1.02 - progress)


def choose_threads(net: StarterNet, tokenizer: Tokenizer) -> int:
    """Times a part of a step at 1, 2, 4, ... threads and returns the fastest number. `net` keeps its parameters.

    More threads are not always better: on a machine that others kept busy, two threads that waited for each other at
    every matrix product were ten times slower than one.
    """
    tokens, targets = (rows[:TIMED_ROWS] for rows in next(batches(tokenizer, 0, device=HOST_MEMORY)))
    seconds: dict[int, float] = {}
    count = 1
    while count <= min(16, len(os.sched_getaffinity(0))):
        torch.set_num_threads(count)
        for _ in range(2):  # the first one pays for starting the threads
            began = time.monotonic()
            net.loss(tokens, targets).backward()
            seconds[count] = time.monotonic() - began
        count *= 2
    net.zero_grad(set_to_none=True)
    return min(seconds, key=lambda n: seconds[n])


def least_steps(minutes: float) -> int:
    """The least number of steps, however busy the machine is."""
    return max(MIN_STEPS, round(MIN_STEPS_PER_MINUTE * minutes))


def pretrain(
    tokenizer: Tokenizer, net: StarterNet, *, seed: int, minutes: float, steps: int | None, device: str
) -> dict:
    """Trains `net` in place; returns steps, tokens, seconds and the validation loss in nats per token."""
    muon, adam = optimizers(net)
    source, started, step, smooth = batches(tokenizer, seed, device=device), time.monotonic(), 0, 0.0
    reported = started
    while True:
        elapsed = time.monotonic() - started
        progress = step / steps if steps is not None else min(elapsed / (minutes * 60), step / least_steps(minutes))
        if progress >= 1:
            break
        scale = rate_scale(progress)
        for optimizer, rate in ((muon, MUON_RATE), (adam, ADAM_RATE)):
            optimizer.param_groups[0]["lr"] = rate * scale
        loss = net.loss(*next(source))
        loss.backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        value = loss.item()
        smooth = value if step == 1 else 0.9 * smooth + 0.1 * value
        now = time.monotonic()
        if now - reported >= 1.0:
            reported = now
            report(
                "progress",
                stage="train",
                fraction=round(0.05 + 0.9 * progress, 4),
                step=step,
                loss=round(smooth, 4),
                tokens_per_s=round(step * BATCH * LENGTH / (now - started)),
            )
    seconds = time.monotonic() - started
    with torch.no_grad():
        held_out = itertools.islice(batches(tokenizer, seed + VALIDATION_SEED_OFFSET, device=device), HELD_OUT_BATCHES)
        validation_loss = sum(net.loss(*batch).item() for batch in held_out) / HELD_OUT_BATCHES
    return {
        "steps": step,
        "tokens": step * BATCH * LENGTH,
        "seconds": round(seconds, 1),
        "validation_loss": round(validation_loss, 4),
    }


def save(out: Path, tokenizer: Tokenizer, net: StarterNet, card: str) -> None:
    """Writes the checkpoint directory (bfloat16 safetensors) beside `out`, then renames it into place."""
    shape = net.shape
    eos, pad = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    partial.mkdir(mode=0o700)
    try:
        weights = {
            name: p.detach().to(HOST_MEMORY, torch.bfloat16).contiguous() for name, p in net.state_dict().items()
        }
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(partial / "tokenizer.json"))
        described = {
            "config.json": shape.config(bos=pad, eos=eos, pad=pad),
            "tokenizer_config.json": tokenizer_config(shape.max_position_embeddings),
            "generation_config.json": {
                "bos_token_id": pad,
                "eos_token_id": [eos, pad],
                "pad_token_id": pad,
                "do_sample": True,
                "temperature": 0.7,
                "top_p": 0.95,
            },
        }
        for name, content in described.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def model_card(result: dict, *, parameters: int, seed: int, shape: Shape) -> str:
    """README.md of the checkpoint: what this model is, and what it is not."""
    return f"""# starter

A very small language model ({parameters / 1e6:.1f} M parameters, Llama architecture), pretrained from random weights on
this machine in {result["seconds"]:.0f} seconds so that the appliance can be used with nothing downloaded.

**It is not a useful assistant.** It knows about a thousand English words, greetings, short stories made from a few
plots, some facts (capitals, colours, opposites) and small sums, many of which it gets wrong. Asked about anything
else it says that it does not know, or answers beside the point. Do not judge the appliance's quality of serving or
of fine-tuning by it: import a real checkpoint with `appliance model import`.

| | |
|---|---|
| training text | made by rule (`train/starter/text.py`); no text of others, no data set |
| vocabulary | byte-level BPE, {shape.vocab_size} entries; `--vocabulary-text` files shape the vocabulary only |
| layers, width, heads | {shape.num_hidden_layers}, {shape.hidden_size}, {shape.num_attention_heads} \
({shape.num_key_value_heads} for keys and values), head size {shape.head_dim} |
| context | {shape.max_position_embeddings} positions declared; pretrained on {LENGTH} at a time |
| steps, tokens | {result["steps"]}, {result["tokens"]:,} |
| seed | {seed} (`--steps {result["steps"]} --seed {seed}` makes one like it) |
| validation loss | {result["validation_loss"]} nats per token on text of the same rules, other seed |
| chat format | ChatML; the template marks assistant turns for training masks |
| licence | that of the appliance |
"""


def vocabulary_texts(path: Path) -> Iterator[str]:
    """The texts of a file: those of its messages if it is chat JSONL, else all of it."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        yield content
        return
    for line in content.splitlines():
        for message in json.loads(line)["messages"]:
            yield message["content"]


def report(event: str, **data: object) -> None:
    print(json.dumps({"event": event, **data}), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.starter.main", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to create; must not exist")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes",
        type=float,
        default=1.5,
        help="pretraining time; longer where the machine is busy (default %(default)s)",
    )
    length.add_argument("--steps", type=int, help="pretrain this many steps instead, reproducibly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: whatever is fastest; 1 with --steps)")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the calling thread ends")
    # A box's GPUs belong to engines and ranks, which have all of their memory, or are out of use for a reason.
    kinds_of_device = sorted({kind.torch_type for kind in kinds.KINDS.values()})
    parser.add_argument("--device", choices=kinds_of_device, default=HOST_MEMORY, help="default: %(default)s")
    vocabulary = "text or chat JSONL whose words the tokenizer should know; not trained on"
    parser.add_argument("--vocabulary-text", type=Path, action="append", default=[], metavar="FILE", help=vocabulary)
    args = parser.parse_args(argv)
    if args.out.exists():
        parser.error(f"--out {args.out} exists already; give a directory that does not")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: the directory {args.out.parent} does not exist; create it first")
    if not 0 < args.minutes <= 600 or (args.steps is not None and args.steps < 1):
        parser.error("--minutes must be above 0 and at most 600, --steps at least 1")
    for path in args.vocabulary_text:
        if not path.is_file():
            parser.error(f"--vocabulary-text {path}: no such file")
    if args.die_with_parent:
        die_with_parent()
        dies_as(DiesAs.TRIAL)  # below a box, whose jobs and engines outlast it
    torch.manual_seed(args.seed)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    started, shape = time.monotonic(), Shape()
    report("progress", stage="tokenizer", fraction=0.0)
    made = (render(document) for document in itertools.islice(documents(args.seed), TOKENIZER_DOCUMENTS))
    given = itertools.chain.from_iterable(map(vocabulary_texts, args.vocabulary_text))
    tokenizer = train_tokenizer(itertools.chain(made, given), vocab_size=shape.vocab_size)
    kind = kinds.of_torch(torch.device(args.device))
    dtype = torch.bfloat16 if kind.computes_bf16() else torch.float32
    net = StarterNet(shape, compute_dtype=dtype).to(args.device)
    if kind.on_host:
        threads = args.threads or (1 if args.steps is not None else choose_threads(net, tokenizer))
        torch.set_num_threads(threads)
        report("progress", stage="threads", fraction=0.05, threads=threads)
    result = pretrain(tokenizer, net, seed=args.seed, minutes=args.minutes, steps=args.steps, device=args.device)
    report("progress", stage="save", fraction=0.95)
    parameters = sum(p.numel() for p in net.parameters())
    save(args.out, tokenizer, net, model_card(result, parameters=parameters, seed=args.seed, shape=shape))
    result["seconds"] = round(time.monotonic() - started, 1)
    report("done", path=str(args.out), parameters=parameters, **result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
