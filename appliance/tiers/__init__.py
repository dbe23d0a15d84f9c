"""Copies of versions and snapshots outside shared memory: which exist, which are due, and how they are restored.

Never: Knows a format of bytes (weights.tiers does) or decides where engines go.
Begin with tiers.py.
"""
