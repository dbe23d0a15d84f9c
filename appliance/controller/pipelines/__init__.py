"""Pipelines: from data to a version that answers, by a few lines that a person has written, whenever it is time.

Never: Trains, judges or activates anything itself; it makes jobs and their gates, and tells how far they are.
Begin with spec.py, then runner.py.
"""
