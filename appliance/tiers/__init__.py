"""Copies of versions and snapshots outside shared memory: which exist, which are due, and the way back.

Never: Knows a format of bytes (weights.tiers does) or decides where engines go.
Begin with tiers.py.
"""
