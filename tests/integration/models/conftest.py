from tests.unit.models.conftest import *  # noqa: F403
