"""lm-evaluation-harness itself, in an environment of its own, asks a box by the command. What the box keeps as runs of
evaluations are the scores that the library gives when it asks the same model by itself."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.e2e.box_support import WholeBox, wait_for, whole_box
from tests.e2e.machines_support import deploy_tiny

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

PROJECT = Path(__file__).parents[2]
NEEDED = ("typer>=0.29,<1", "rich>=15", "orjson>=3.11", "nvidia-ml-py>=13", f"transformers=={transformers.__version__}")
LIBRARY = "lm-eval[api]==0.4.13"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
COLOURS = [" red", " blue", " green", " white"]
CHOOSE = f"""doc_to_choice: {json.dumps(COLOURS)}
metric_list:
- {{metric: acc, aggregation: mean, higher_is_better: true}}
- {{metric: acc_norm, aggregation: mean, higher_is_better: true}}"""
ASK = """generation_kwargs: {max_gen_toks: 8, until: ["\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"""
SHARE = """generation_kwargs: {max_gen_toks: 8, until: ["\\n"]}
process_results: !function scores.share
metric_list: [{metric: share, aggregation: mean, higher_is_better: true}]"""
SCORES = """
def share(doc, results):
    said, wanted = set(results[0]), set(doc["answer"])
    return {"share": len(said & wanted) / max(1, len(said | wanted))}
"""
THINGS = ["sky", "door", "car", "boat", "hat", "cup", "wall", "bird", "fish", "ball", "shoe", "lamp"]
BY_ITSELF = """
import json, os, sys
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OPENAI_API_KEY=sys.argv[2])
import lm_eval
from lm_eval.tasks import TaskManager
url, _, tokenizer, tasks = sys.argv[1:]
manager, told = TaskManager(include_path=tasks), {}
for task, model, path, more, how in (
    ("choose", "local-completions", "completions", {"tokenizer": tokenizer, "tokenized_requests": False}, {}),
    ("ask", "local-chat-completions", "chat/completions", {"tokenizer_backend": None}, {"apply_chat_template": True}),
    ("share", "local-chat-completions", "chat/completions", {"tokenizer_backend": None}, {"apply_chat_template": True}),
):
    arguments = {"model": "tiny", "base_url": f"{url}/{path}", "num_concurrent": 2, **more}
    found = lm_eval.simple_evaluate(model, model_args=arguments, tasks=[task], task_manager=manager, **how)
    samples = sorted(found["samples"][task], key=lambda one: one["doc_id"])
    told[task] = [{name: one[name] for name in one["metrics"]} for one in samples]
json.dump(told, open(tasks + "/by-itself.json", "w"))
"""


def written_tasks(box: WholeBox, tasks: Path) -> None:
    """Half of the answers that are wanted are those that the model gives, so that scores differ among questions."""
    tasks.mkdir()
    asks = box.client()
    rows = []
    for number, thing in enumerate(THINGS):
        question = f"The {thing} is"
        said = asks.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": question}], max_tokens=8, temperature=0, stop=["\n"]
        )
        given = said.choices[0].message.content or ""
        rows.append({"question": question, "answer": given if number % 2 else given[: len(given) // 2] + "?"})
    (tasks / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = [
        {"question": f"The {thing} is", "answer": COLOURS[number % len(COLOURS)]} for number, thing in enumerate(THINGS)
    ]
    (tasks / "chosen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    (tasks / "scores.py").write_text(SCORES)
    for name, kind, data, more in (
        ("choose", "multiple_choice", "chosen", CHOOSE),
        ("ask", "generate_until", "asked", ASK),
        ("share", "generate_until", "asked", SHARE),
    ):
        text = TASK.format(name=name, kind=kind, data=tasks / f"{data}.jsonl", more=more)
        (tasks / f"{name}.yaml").write_text(text)


def rewards(box: WholeBox, eval_id: str, run_id: str) -> list[dict[str, float]]:
    """Of each item in order, by the SDK."""
    items = box.client().evals.runs.output_items.list(run_id, eval_id=eval_id, limit=100).data
    return [
        {one["name"]: one["score"] for one in (result.to_dict() for result in item.results)}
        for item in sorted(items, key=lambda item: item.datasource_item_id)
    ]


def judged(box: WholeBox, row: dict[str, Any]) -> Any:
    """The run that a figure is kept as, once it has ended."""
    run = box.client().evals.runs.retrieve(row["run_id"], eval_id=row["eval_id"])
    return run if run.status in ("completed", "failed") else None


def test_what_is_kept_of_own_tasks_are_the_librarys_own_scores(tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", LIBRARY, *NEEDED], check=True)
    tasks = tmp_path / "tasks"
    (tmp_path / "box").mkdir()
    with whole_box(tmp_path / "box", "[box]\ndevices = 2\n") as box:
        deploy_tiny(box)
        written_tasks(box, tasks)
        command = [python, "-m", "appliance.cli.main", "eval", "harness", "tiny", "--tasks", "choose,ask,share"]
        command += ["--tasks-path", str(tasks), "--data-dir", str(box.data_dir), "-o", "json"]

        def asked() -> dict[tuple[str, str], dict[str, Any]]:
            # Its process looks at no working directory for what it imports (-P); an installed appliance needs none.
            at = {**os.environ, "PYTHONPATH": str(PROJECT)}
            done = subprocess.run(command, capture_output=True, text=True, env=at, timeout=900)
            assert done.returncode == 0, done.stderr
            return {(row["task"], row["metric"]): row for row in json.loads(done.stdout)["data"]}

        rows = asked()
        assert {name for name, _ in rows} == {"choose", "ask", "share"}
        assert rows["choose", "acc"]["as"] == "text" and rows["ask", "exact_match"]["as"] == "messages"
        assert rows["choose", "acc"]["questions"] == len(THINGS)
        script = [python, "-c", BY_ITSELF, box.url, box.key, str(box.data_dir / "tiny"), str(tasks)]
        done = subprocess.run(script, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
        alone = json.loads((tasks / "by-itself.json").read_text())

        for (task, metric), row in rows.items():
            run = wait_for(lambda row=row: judged(box, row), "a run that is judged", 60)
            assert (run.status, run.name, run.result_counts.total) == ("completed", "tiny", len(THINGS))
            (of,) = [one for one in run.per_testing_criteria_results if one.testing_criteria == metric]
            mean = of.to_dict()["mean_reward"]
            scores = [one[metric] for one in rewards(box, row["eval_id"], row["run_id"])]
            library = [one[metric] for one in alone[task]]
            print(f"{task} {metric}: kept {mean:.4f}, by itself {sum(library) / len(library):.4f}")
            assert scores == pytest.approx(library) and mean == pytest.approx(row["value"])
        assert 0 < rows["ask", "exact_match"]["value"] < 1 and 0 < rows["share", "share"]["value"] < 1

        # Asked once more, it is another run of the same evaluations.
        again = asked()
        assert {one["eval_id"] for one in again.values()} == {one["eval_id"] for one in rows.values()}
        assert {one.name for one in box.client().evals.list().data} == {"choose", "ask", "share"}
        assert "tiny" in box.run("eval", "show", rows["ask", "exact_match"]["eval_id"])
