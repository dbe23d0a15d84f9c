"""Code for CPU engines only: a worker that sleeps, staged versions, finishing streams, LoRA.

Never: Runs on a GPU box.
Begin with worker.py.
"""
