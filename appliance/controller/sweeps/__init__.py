"""Sweeps: hyperparameters are tried on a part of the data, and the best go on with more of it, within a budget.

Never: Trains anything itself; it makes ordinary jobs, and deletes what the losing ones have made.
Begin with halving.py, then runner.py.
"""
