"""Fine-tune on new data, and activate the new version if an evaluation finds it no worse.

    OPENAI_BASE_URL=http://box:8000/v1 OPENAI_API_KEY=sk-... \\
        python retrain_on_schedule.py --base qwen3-8b --name support --data /srv/support/new --eval eval_abc123

Run it from cron or a systemd timer (docs/retraining.md). It trains on all `*.jsonl` files of the folder together, and
moves these files to the subfolder `trained/` once the job has succeeded. After a failure the files stay, and the next
run uses them again. The key needs the scopes `fine_tuning` and `inference`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob


def retrain(client: OpenAI, base: str, name: str, folder: Path, eval_id: str, poll_s: float = 10.0) -> str:
    """Train, then return the gate's verdict as a text for the log. Raises RuntimeError if the job fails."""
    new = sorted(folder.glob("*.jsonl"))
    if not new:
        return "no new data"
    data = b"".join(path.read_bytes().rstrip(b"\n") + b"\n" for path in new)
    file = client.files.create(file=(f"{name}.jsonl", data), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=base,
        training_file=file.id,
        extra_body={"publish_as": name, "gate": {"eval_id": eval_id}},
    )
    job = wait(client, job, poll_s)
    if job.status != "succeeded":
        raise RuntimeError(f"{job.id} {job.status}: {job.error.message if job.error else ''}")
    (folder / "trained").mkdir(exist_ok=True)
    for path in new:
        path.rename(folder / "trained" / path.name)
    gate = job.model_extra["gate"]
    return f"{job.id}: {gate['version']} {gate['verdict']}: {gate['reason']}"


def wait(client: OpenAI, job: FineTuningJob, poll_s: float) -> FineTuningJob:
    """Wait until the job has ended and, after a success, its gate has decided (`activated`). Returns the job."""
    while job.status not in ("failed", "cancelled"):
        if job.status == "succeeded" and job.model_extra["gate"]["activated"] is not None:
            break
        time.sleep(poll_s)
        job = client.fine_tuning.jobs.retrieve(job.id)
    return job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", required=True, help="Model to fine-tune.")
    parser.add_argument("--name", required=True, help="Model that gets the new version.")
    parser.add_argument("--data", required=True, type=Path, help="Folder with new training files.")
    parser.add_argument("--eval", required=True, help="Id of the evaluation that decides; it must have run once.")
    parser.add_argument("--poll", type=float, default=10.0, help="Seconds between two requests for the job's status.")
    options = parser.parse_args()
    try:
        print(retrain(OpenAI(), options.base, options.name, options.data, options.eval, options.poll))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
