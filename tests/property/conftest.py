"""Property tests say nothing of speed: Hypothesis's limit of 200 ms for an example is off."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
