"""Paths of the admin API and of the OpenAI surface that more than one command uses."""

from __future__ import annotations

from urllib.parse import quote

JOBS = "/v1/fine_tuning/jobs"


def segment(name: str) -> str:
    """A name as one segment of a path: model names hold ":" and may hold "/"."""
    return quote(name, safe="")


def job(job_id: str) -> str:
    return f"{JOBS}/{segment(job_id)}"


def admin_job(job_id: str) -> str:
    return f"/admin/v1/jobs/{segment(job_id)}"


def model(name: str) -> str:
    return f"/admin/v1/models/{segment(name)}"


def file(file_id: str) -> str:
    return f"/v1/files/{segment(file_id)}"


def evaluation(eval_id: str) -> str:
    return f"/v1/evals/{segment(eval_id)}"


def gate(gate_id: str) -> str:
    return f"/v1/gates/{segment(gate_id)}"


def pipeline(name: str) -> str:
    return f"/v1/pipelines/{segment(name)}"


def pipeline_run(run_id: str) -> str:
    return f"/v1/pipeline_runs/{segment(run_id)}"


def sweep(sweep_id: str) -> str:
    return f"/v1/sweeps/{segment(sweep_id)}"


def batch(batch_id: str) -> str:
    return f"/v1/batches/{segment(batch_id)}"
