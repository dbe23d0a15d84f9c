"""A student comes nearer to a teacher that an engine serves: the reverse KL divergence on prompts held out, by seed.

    python benchmarks/distillation.py [--model DIRECTORY] [--seeds N ...] [--steps N] [--rollouts engine]
                                       [--teacher DIRECTORY] [--near EPOCHS] [--json FILE]

Two CPU devices in mode `split`, one for the ranks and one for the engine. The teacher is an adapter of the model that
has learnt the demo's 64 questions about who it is (supervised, LoRA of rank 16, three epochs); each student begins from
the model itself, with LoRA of rank 16, eight answers in a step to some of 52 questions; twelve are held out, with two
answers each, or `--held-out`. With `--near` students begin near the teacher: from the model once it has learnt the
same 64 questions for so many epochs, on a third device if engines sample. Without a model a starter is made, which
learns as much of less. What FILE has of other seeds stays in it and counts in the means, and the teacher is that of
DIRECTORY, or is kept there once it is made: so seeds can be run one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import record, stated  # noqa: E402 - the path comes first
from tests.e2e.box_support import DEMO_DATA, wait_for, whole_box  # noqa: E402
from weights.format.names import encode_name  # noqa: E402

HELD_OUT = 12


def questions() -> list[dict]:
    lines = (DEMO_DATA / "identity.jsonl").read_text().splitlines()
    return [{"messages": json.loads(line)["messages"][:-1]} for line in lines]


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def ended(box, client, job_id: str):
    box.run("job", "wait", job_id, "--timeout", "3600", timeout_s=3700)
    return client.fine_tuning.jobs.retrieve(job_id)


def supervised(box, client, model: str, epochs: int, **more) -> str:
    """The name of the model once it has learnt who it is; more: hyperparameters."""
    job = client.fine_tuning.jobs.create(
        model=model,
        training_file=box.upload((DEMO_DATA / "identity.jsonl").read_bytes()),
        seed=1,
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": epochs, "lora_rank": 16, **more}},
        },
    )
    return ended(box, client, job.id).fine_tuned_model


def taught(box, client, model: str, kept: Path | None) -> str:
    """The name of the teacher, which is imported if it was kept before, and kept otherwise."""
    if kept and kept.exists():
        box.run("model", "import", str(kept), "--name", "teacher", "--base", model, timeout_s=600)
        return "teacher"
    name = supervised(box, client, model, 3)
    if kept:
        folder = box.data_dir / "models" / encode_name(name)
        (version,) = wait_for(lambda: folder.is_dir() and list(folder.iterdir()), "the teacher on disk", 120)
        shutil.copytree(version, kept)
    return name


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path)
    options.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    options.add_argument("--teacher", type=Path)
    options.add_argument("--steps", type=int, default=26)
    options.add_argument("--batch", type=int, default=2, help="questions of a step, which has eight answers")
    options.add_argument("--rollouts", default="ranks")
    options.add_argument("--rate", type=float, default=2e-4)
    options.add_argument("--held-out", type=int, default=2, help="answers to each question that is held out")
    options.add_argument("--near", type=int, default=0)
    options.add_argument("--validations", type=int, default=4, help="beside the one before the first step")
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    found: dict[str, dict] = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    print(f"load before {os.getloadavg()}", flush=True)
    # Students that begin near the teacher have a base of their own, so an engine of their own.
    devices = 3 if asked.near and asked.rollouts == "engine" else 2
    with tempfile.TemporaryDirectory() as folder, whole_box(Path(folder), f"[box]\ndevices = {devices}\n") as box:
        if asked.model:
            box.run("model", "import", str(asked.model), "--name", "base", timeout_s=600)
            model = "base"
        else:
            box.make_starter(steps=60)
            model = "starter"
        box.run("mode", "set", "split", "--train", "1", "--wait")
        client = box.client(max_retries=5)
        teacher = taught(box, client, model, asked.teacher)
        # Else the first validation is sampled by the ranks, where an engine takes more than their patience to start.
        client.chat.completions.create(model=teacher, messages=[{"role": "user", "content": "Hello"}], max_tokens=1)
        start = supervised(box, client, model, asked.near, lora_publish="merged") if asked.near else model
        asked_of = questions()
        train, valid = (
            box.upload(jsonl(rows), name)
            for rows, name in ((asked_of[HELD_OUT:], "train.jsonl"), (asked_of[:HELD_OUT], "valid.jsonl"))
        )
        batch = asked.batch
        for seed in asked.seeds:
            began_s = time.monotonic()
            hyperparameters = {
                "n_epochs": max(1, asked.steps * batch // len(asked_of[HELD_OUT:])),
                "batch_size": batch,
                "samples": 8 // batch,
                "eval_samples": asked.held_out,
                "eval_interval": max(1, asked.steps // asked.validations),
                "max_completion_tokens": 32,
                "lora_rank": 16,
                "learning_rate": asked.rate,
                "rollouts": asked.rollouts,
            }
            job = client.fine_tuning.jobs.create(
                model=start,
                training_file=train,
                validation_file=valid,
                seed=seed,
                method={
                    "type": "distillation",
                    "distillation": {"teacher": teacher, "hyperparameters": hyperparameters},
                },
            )
            done = ended(box, client, job.id)
            events = [e.data for e in client.fine_tuning.jobs.list_events(job.id, limit=100) if e.type == "metrics"]
            steps = {data["step"]: data for data in events if "reverse_kl" in data}
            held_out = {data["step"]: data for data in events if "valid_reverse_kl" in data}
            took = [data["timing"]["step"] for data in steps.values()]
            parts = {part: round(statistics.median(one[part] for one in took), 2) for part in took[0]}
            print(f"seed {seed}: {done.status} in {time.monotonic() - began_s:.0f} s, a step {parts}")
            for name, rows, key in (
                ("KL of the step", steps, "reverse_kl"),
                ("entropy of the step", steps, "entropy"),
                ("KL held out", held_out, "valid_reverse_kl"),
                ("of an answer", held_out, "valid_answer_reverse_kl"),
                ("entropy held out", held_out, "valid_entropy"),
            ):
                print(f"  {name:20}", {step: round(rows[step][key], 3) for step in sorted(rows)}, flush=True)
            found[str(seed)] = {"steps": steps, "held_out": held_out}
        students = [("student", done.fine_tuned_model)] if asked.seeds else []
        for name, one in (("before", start), ("teacher", teacher), *students):
            answer = client.chat.completions.create(
                model=one, messages=asked_of[0]["messages"], max_tokens=32, temperature=0
            )
            print(f"{name}: {answer.choices[0].message.content!r}")
    print(f"load after {os.getloadavg()}, {time.strftime('%Y-%m-%d')}")
    size = f"{'SmolLM2-135M' if asked.model else 'starter'}, LoRA of rank 16, {asked.steps} steps"
    size += f", near the teacher by {asked.near}" if asked.near else ""
    rows = []
    for key, unit in (("valid_reverse_kl", "nats a token"), ("valid_answer_reverse_kl", "nats an answer")):
        for name, pick in (("before", min), ("after", max)):
            if not found:
                continue
            values = [one["held_out"][pick(one["held_out"], key=int)][key] for one in found.values()]
            rows.append(stated(f"reverse KL held out, {name}: mean", size, statistics.mean(values), unit))
            if len(values) > 1:
                rows.append(stated(f"the same, {name}: deviation", size, statistics.stdev(values), unit))
    record(__file__, rows)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
