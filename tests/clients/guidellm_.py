"""https://github.com/vllm-project/guidellm: `guidellm run` with a backend, data and the tokenizer of the model."""

import json
import os
import pathlib
import subprocess
import tempfile

from report import BASE_URL, KEY, MODEL, tried

folder = pathlib.Path(tempfile.mkdtemp())


def stream():
    backend = f"kind=openai_http,target={BASE_URL.removesuffix('/v1')},model={MODEL},api_key={KEY}"
    command = ["guidellm", "run", "--backend", backend, "--profile", "kind=synchronous"]
    command += ["--constraint", "kind=max_requests,count=3"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={os.environ['MODEL_DIRECTORY']}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=4"]
    command += ["--output", f"kind=json,path={folder}", "--disable-console-interactive"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, (done.stderr + done.stdout)[-600:]
    (measured,) = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
    requests = measured["requests"]
    assert len(requests["successful"]) == 3 and not requests["errored"], requests["errored"]


tried(stream)
