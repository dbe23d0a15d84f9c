"""Tasks of EleutherAI's lm-evaluation-harness, asked of models of a box.

Never: Runs in a process of the box: `appliance eval harness` has a process of its own, and the library is optional.
Begin with main.py.
"""
