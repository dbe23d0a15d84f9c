"""Runs the engine process and its supervisor: fork, serve, swap, sleep, wake, stop.

Never: It converts no weights (serve.load) and changes nothing inside vLLM (serve.vllm).
Begin with replica.py (outside), main.py and control.py (inside).
"""
