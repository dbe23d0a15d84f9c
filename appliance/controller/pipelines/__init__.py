"""Pipelines: each turns new data into a version that answers, as a person's few lines say, on a schedule or when asked.

Never: Trains, judges or activates anything itself; it makes jobs and their gates, and tells how far they are.
Begin with spec.py, then runner.py.
"""
