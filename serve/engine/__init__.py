"""Runs the engine process and its supervisor: fork, serve, swap, sleep, wake, stop.

Never: Loads weights (serve.load) or changes vLLM's code (serve.vllm).
Begin with replica.py (outside), main.py and control.py (inside).
"""
