"""Copies of versions and snapshots outside shared memory: which exist, which are due, and the way back.

Never: It knows no format of bytes (weights.tiers does) and decides no placement of engines.
Begin with flow.py (out), restore.py (back).
"""
