"""https://github.com/EleutherAI/lm-evaluation-harness, "Model APIs and Inference Servers": local-chat-completions,
local-completions.

Its tasks come from a hub, which is not reachable everywhere, so this script defines a task of three questions.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from report import BASE_URL, MODEL, tried

folder = pathlib.Path(tempfile.mkdtemp())
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
ROWS = [("The capital of France is", " Paris"), ("Two and two is", " four"), ("The sky is", " blue")]
(folder / "rows.jsonl").write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in ROWS))
GENERATE = """generation_kwargs: {max_gen_toks: 8, until: ["\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"""
CHOOSE = """doc_to_choice: [" Paris", " four", " blue"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"""
for name, kind, more in (("ask", "generate_until", GENERATE), ("choose", "multiple_choice", CHOOSE)):
    text = TASK.format(name=name, kind=kind, data=folder / "rows.jsonl", more=more)
    (folder / f"{name}.yaml").write_text(text)


def evaluate(model, task, path, *more):
    arguments = f"model={MODEL},base_url={BASE_URL}/{path},num_concurrent=2,max_retries=1,tokenizer_backend=None"
    if path == "completions":
        # Scores need the tokens of a text, by the tokenizer of the requested model.
        arguments = arguments.replace("tokenizer_backend=None", f"tokenizer={TOKENIZER},tokenized_requests=False")
    command = ["-m", "lm_eval", "run", "--model", model, "--tasks", task, "--include_path", str(folder)]
    done = subprocess.run(
        [sys.executable, *command, "--model_args", arguments, *more], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, (done.stderr + done.stdout)[-600:]
    assert task in done.stdout


def plain():
    evaluate("local-chat-completions", "ask", "chat/completions", "--apply_chat_template")


def logprobs():
    evaluate("local-completions", "choose", "completions")


if __name__ == "__main__":
    import os

    TOKENIZER = os.environ.get("MODEL_DIRECTORY", "")
    tried(plain, logprobs)
