"""Search hyperparameters with Optuna: each trial is a fine-tuning job, compared by its validation loss.

    pip install openai optuna
    OPENAI_BASE_URL=http://box:8000/v1 OPENAI_API_KEY=sk-... \\
        python sweep_with_optuna.py --model qwen3-8b --train train.jsonl --validation held-out.jsonl --trials 12

Trials run one after another on all devices; all models except the best one are deleted. To continue after an
interruption, give Optuna a storage (`--storage sqlite:///sweep.db`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import OpenAI


def objective(
    client: OpenAI, model: str, training_file: str, validation_file: str, poll_s: float = 10.0
) -> Callable[[Any], float]:
    """Return the function that Optuna minimizes: it trains with a trial's hyperparameters and returns the loss.

    Raises RuntimeError if a job fails; `study.optimize(catch=RuntimeError)` continues with the next trial.
    """

    def loss_of(trial: Any) -> float:
        hyperparameters = {
            "learning_rate_multiplier": trial.suggest_float("learning_rate_multiplier", 0.1, 10, log=True),
            "batch_size": trial.suggest_categorical("batch_size", [8, 16, 32]),
            "n_epochs": trial.suggest_int("n_epochs", 1, 4),
        }
        job = client.fine_tuning.jobs.create(
            model=model,
            training_file=training_file,
            validation_file=validation_file,
            method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        )
        while job.status not in ("succeeded", "failed", "cancelled"):
            time.sleep(poll_s)
            job = client.fine_tuning.jobs.retrieve(job.id)
        if job.status != "succeeded":
            raise RuntimeError(f"{job.id} {job.status}: {job.error.message if job.error else ''}")
        trial.set_user_attr("model", job.fine_tuned_model)
        newest = next(iter(client.fine_tuning.jobs.checkpoints.list(job.id)))
        return newest.metrics.valid_loss

    return loss_of


def keep_best(client: OpenAI, best: str, models: list[str]) -> None:
    """Delete the models of all trials except the best trial's."""
    for name in models:
        if name != best:
            client.models.delete(name)


def main() -> int:
    import optuna

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True, type=Path)
    parser.add_argument("--validation", required=True, type=Path)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--storage", help="Storage of Optuna's study, such as sqlite:///sweep.db.")
    options = parser.parse_args()
    client = OpenAI()
    train, validation = (
        client.files.create(file=path, purpose="fine-tune").id for path in (options.train, options.validation)
    )
    study = optuna.create_study(study_name=options.model, storage=options.storage, load_if_exists=True)
    study.optimize(objective(client, options.model, train, validation), n_trials=options.trials, catch=RuntimeError)
    best = study.best_trial
    keep_best(client, best.user_attrs["model"], [t.user_attrs["model"] for t in study.trials if t.user_attrs])
    print(f"{best.user_attrs['model']}: loss {best.value:.4f} with {best.params}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
