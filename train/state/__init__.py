"""Writes and restores a run's state: fragments of ZeRO, snapshots, published versions.

Never: Decides when to save (train.trainer does).
Begin with copies.py, then snapshot.py.
"""
