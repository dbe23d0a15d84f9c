"""Code for CPU engines only: a worker that sleeps, LoRA.

Never: Runs on a GPU box.
Begin with worker.py.
"""
