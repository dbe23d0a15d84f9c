from tests.unit.scheduling.conftest import *  # noqa: F403
