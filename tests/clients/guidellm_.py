"""https://github.com/vllm-project/guidellm: a benchmark against a target, with the tokenizer of the model."""

import json
import os
import subprocess
import tempfile

from report import BASE_URL, KEY, MODEL, tried


def stream():
    command = ["guidellm", "benchmark", "run", "--target", BASE_URL.removesuffix("/v1"), "--model", MODEL]
    command += ["--processor", os.environ["MODEL_DIRECTORY"], "--data", "prompt_tokens=16,output_tokens=4"]
    command += ["--profile", "synchronous", "--max-requests", "3", "--output-path", tempfile.mkdtemp()]
    command += ["--backend-kwargs", json.dumps({"api_key": KEY})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, (done.stderr + done.stdout)[-600:]


tried(stream=stream)
