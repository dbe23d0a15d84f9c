from tests.unit.cli.conftest import *  # noqa: F403
