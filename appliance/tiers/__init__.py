"""Copies of versions and snapshots outside shared memory: which copies exist, which are due, and how to restore them.

Never: Knows a format of bytes (weights.tiers does) or decides where engines go.
Begin with tiers.py.
"""
