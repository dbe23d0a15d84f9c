"""Processes: the warm parent that forks, the leash a forked child hangs on, and its supervisor's end of it.

Knows neither vLLM nor DeepSpeed. Reading order: channel -> warm_parent -> leash -> child.
"""
