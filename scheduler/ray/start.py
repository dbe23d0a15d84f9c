"""Runs a modified `ray start`: `python -m scheduler.ray.start LOGS start --head ...` takes Ray's options after the
folder for its logs.

- It leaves out unused parts: the commands for Ray Serve, jobs and states, whose imports take most of the time of `ray
  start`; the dashboard process, which Ray starts even when disabled; and the server for remote drivers (Ray Client),
  which takes 90 MB and port 10001, so that two boxes would collide, and has no option to disable it.
- When a raylet dies, the kernel kills all processes it started. Without this, workers notice its end after up to two
  seconds, and agents after a minute.
- `--block` ends when any process it started ends, for any reason. Unmodified Ray treats exit code 0 and SIGTERM as
  requested ends, so a head node could be without a raylet forever.
- Folders are private to their owner, and logs go to a directory with enough room.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

OTHER_COMMANDS = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")
CODES_OF_A_REQUEST = (0, signal.SIGTERM, -signal.SIGTERM, 128 + signal.SIGTERM)
FAILED = 1
TIE = "setpriv --pdeathsig KILL"
"""Runs a command that ends with its parent (util-linux)."""
COMMANDS_OF_A_RAYLET = ("--python_worker_command=", "--dashboard_agent_command=", "--runtime_env_agent_command=")


def main() -> None:
    # ray.scripts.scripts skips commands whose import fails.
    sys.modules.update(dict.fromkeys(OTHER_COMMANDS))
    from ray._private import node, services
    from ray._private.node import Node
    from ray.scripts import scripts

    Node.start_api_server = _without_dashboard
    Node.start_ray_client_server = _without_ray_client
    Node._init_temp = _logging_to(Path(sys.argv.pop(1)), Node._init_temp)
    node.try_to_create_directory = _private_folder
    Node.dead_processes = _all_failed(Node.dead_processes)
    services.start_ray_process = _tying(services.start_ray_process)
    scripts.main()


def _without_dashboard(node: Any, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
    if include_dashboard is not False:
        raise ValueError("this start of Ray has no dashboard; give --include-dashboard=false")


def _without_ray_client(node: Any) -> None:
    return


def _logging_to(logs: Path, init_temp: Callable[..., None]) -> Callable[..., None]:
    """Put logs outside the session directory, although Ray has no option for this. The session directory is in shared
    memory, where socket paths are short enough."""

    def init_with_logs(node: Any, *arguments: Any) -> None:
        session = Path(node._ray_params.temp_dir, node._session_name)
        session.mkdir(mode=0o700, exist_ok=True)
        session.joinpath("logs").symlink_to(logs)
        init_temp(node, *arguments)

    return init_with_logs


def _private_folder(path: str) -> None:
    os.makedirs(path, mode=0o700, exist_ok=True)


def _all_failed(dead_processes: Callable[[Any], list[tuple[str, Any]]]) -> Callable[[Any], list[tuple[str, Any]]]:
    """Make `ray start --block`, which checks exit codes, treat requested ends of processes as failures."""

    def dead(node: Any) -> list[tuple[str, Any]]:
        processes = dead_processes(node)
        for _, process in processes:
            if process.returncode in CODES_OF_A_REQUEST:
                process.returncode = FAILED
        return processes

    return dead


def _tying(start: Callable[..., Any]) -> Callable[..., Any]:
    def start_ray_process(command: Sequence[str], *arguments: Any, **named: Any) -> Any:
        return start(tied_commands(command), *arguments, **named)

    return start_ray_process


def tied_commands(command: Sequence[str]) -> list[str]:
    """Change a raylet's command line so that its child processes die with it; other command lines stay unchanged."""
    return [
        f"{option}{TIE} {argument.removeprefix(option)}"
        if (option := next(filter(argument.startswith, COMMANDS_OF_A_RAYLET), None))
        else argument
        for argument in command
    ]


if __name__ == "__main__":
    main()
