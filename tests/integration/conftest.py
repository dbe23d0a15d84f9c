from tests.unit.conftest import *  # noqa: F403
