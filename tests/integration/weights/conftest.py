from tests.unit.weights.conftest import *  # noqa: F403
