from tests.unit.controller.conftest import *  # noqa: F403
