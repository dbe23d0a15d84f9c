"""Runs the engine process and its supervisor: fork, serve, swap, sleep, wake, stop.

Never: Converts weights (serve.load) or changes anything inside vLLM (serve.vllm).
Begin with replica.py (outside), main.py and control.py (inside).
"""
