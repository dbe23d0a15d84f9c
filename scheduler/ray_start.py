"""`ray start` with less of Ray: `python -m scheduler.ray_start start --head ...` takes the same options.

Left out is what nobody here uses: the commands for Ray Serve, jobs and states, whose imports take most of the time of
`ray start`, and the process of the dashboard, which Ray starts, and waits for, even where it is told not to.
"""

from __future__ import annotations

import sys
from typing import Any

OTHER_COMMANDS = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")


def main() -> None:
    # ray.scripts.scripts goes on without those of its commands that cannot be imported.
    sys.modules.update(dict.fromkeys(OTHER_COMMANDS))
    from ray._private.node import Node
    from ray.scripts import scripts

    Node.start_api_server = _without_dashboard
    scripts.main()


def _without_dashboard(node: Any, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
    if include_dashboard is not False:
        raise ValueError("this start of Ray has no dashboard; give --include-dashboard=false")


if __name__ == "__main__":
    main()
