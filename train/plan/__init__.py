"""Describes a job without torch: its spec, automatic hyperparameters and memory estimate.

Never: It starts nothing and reads no data.
Begin with spec.py.
"""
