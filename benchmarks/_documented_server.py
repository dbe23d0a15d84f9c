"""vLLM's own server, started and reloaded as its documentation says: what engine_swap.py compares with."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx


def documented_server(path: Path, rounds: int, dtype: str) -> dict:
    """Cold start of vLLM's own server to its first token, and its own reload of the weights."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(path.parent),
        "TMPDIR": str(path.parent),
    }
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(path),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        dtype,
        "--served-model-name",
        "starter",
    ]
    log = open(path.parent / "cold.log", "wb")
    began_s = time.perf_counter()
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd="/")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
            while True:
                if server.poll() is not None:
                    raise RuntimeError(Path(log.name).read_text()[-3000:])
                try:
                    if http.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            body = {"model": "starter", "prompt": "the", "max_tokens": 1}
            http.post("/v1/completions", json=body).raise_for_status()
            cold_s = time.perf_counter() - began_s
            reloads = []
            for _ in range(rounds + 1):
                reload_s = time.perf_counter()
                http.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
                reloads.append(time.perf_counter() - reload_s)
        return {"cold_start_s": cold_s, "reload_s": statistics.median(reloads[1:])}
    finally:
        os.kill(server.pid, signal.SIGTERM)  # an orderly end removes its segments from /dev/shm
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            print("the documented server did not end by itself", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()
