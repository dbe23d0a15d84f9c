"""Writes and restores a run's state: fragments of ZeRO, snapshots, published versions, parked ranks.

Never: Decides when to save; the step loop does.
Begin with snapshot.py, then saving.py.
"""
