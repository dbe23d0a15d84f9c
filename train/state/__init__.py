"""Writes and restores a run's state: fragments of ZeRO, snapshots, published versions, parked ranks.

Never: Decides when to save; the step loop does.
Begin with saving.py (when), then writing.py (how) and snapshot.py (what).
"""
