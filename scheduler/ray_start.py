"""`ray start` with less of Ray: `python -m scheduler.ray_start start --head ...` takes the same options.

Left out is what nobody here uses: the commands for Ray Serve, jobs and states, whose imports take most of the time of
`ray start`; the process of the dashboard, which Ray starts, and waits for, even where it is told not to; and the server
for remote drivers (Ray Client), another 90 MB and a port, 10001, that no option closes and two boxes would both want.
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
    Node.start_ray_client_server = _without_ray_client
    scripts.main()


def _without_dashboard(node: Any, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
    if include_dashboard is not False:
        raise ValueError("this start of Ray has no dashboard; give --include-dashboard=false")


def _without_ray_client(node: Any) -> None:
    return


if __name__ == "__main__":
    main()
