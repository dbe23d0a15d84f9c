"""Plans a job without importing torch: its spec, automatic hyperparameters, and memory estimate.

Never: Starts anything or reads data.
Begin with spec.py.
"""
