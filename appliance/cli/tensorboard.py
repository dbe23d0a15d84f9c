"""`appliance job tensorboard`: the curves of this machine's jobs in TensorBoard."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import output
from appliance.cli.command import DATA_DIR, examples, group
from appliance.cli.complete import jobs as complete_jobs
from appliance.cli.errors import BadUsage, NotFound
from appliance.cli.locate import BoxFile

FOLDER = "tb"  # below a job's own, where rank 0 writes (train/run/loop.py)
JOBS = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB_ID]...", autocompletion=complete_jobs, help="Default: every job, also later ones."),
]

app = group("Curves of jobs; `appliance job` takes this command in.")


@app.command(
    epilog=examples(
        "appliance job tensorboard                                every job of this machine, at http://localhost:6006",
        "appliance job tensorboard ftjob-abc123 ftjob-def456      two of them, one above the other",
        "appliance job tensorboard --port 7007                    Ctrl-C ends it; the box and its jobs do not notice",
    )
)
def tensorboard(
    job_ids: JOBS = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="On loopback; 0: any that is free.")] = 6006,
    data_dir: DATA_DIR = None,
) -> None:
    """Show the curves of jobs in TensorBoard, until Ctrl-C. It reads their files, whether the box runs or not."""
    folder = BoxFile.read(data_dir).data_dir / "jobs"
    chosen = list(dict.fromkeys(job_ids or ()))
    for job_id in chosen:
        if Path(job_id).name != job_id or not (folder / job_id / FOLDER).is_dir():
            raise NotFound(
                f"no curves of {job_id!r} below {folder}: a job has them from its first step on, on the machine where "
                "its first rank runs (elsewhere than the box itself: `away-jobs` of that node's data directory)"
            )
    if not folder.is_dir():
        raise NotFound(f"no job has run on {folder.parent}; --data-dir names another box of this machine")
    if importlib.util.find_spec("tensorboard") is None:
        raise BadUsage(
            "TensorBoard is not installed here: `pip install tensorboard` brings it (the extra `tracking` of the "
            f"appliance has it too). The files that it reads are {folder}/JOB_ID/{FOLDER}, and may be copied elsewhere"
        )
    # From the folder, with names alone: a comma or colon in the path of the data directory would part it there.
    shown = [f"--logdir_spec={','.join(f'{one}:{one}' for one in chosen)}"] if chosen else ["--logdir=."]
    output.say(f"curves of {', '.join(chosen) or f'all jobs below {folder}'}; Ctrl-C ends TensorBoard")
    os.chdir(folder)
    # In place of this process, so that Ctrl-C and signals are TensorBoard's. It has no login, so it stays on loopback.
    os.execv(
        sys.executable,
        [sys.executable, "-P", "-m", "tensorboard.main", *shown, f"--port={port}", "--host=localhost"],
    )
