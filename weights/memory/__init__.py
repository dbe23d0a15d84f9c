"""Keeps versions in shared memory: reserve, write, commit, lease, evict, safe against kill -9 at any point.

Never: Depends on a model or uses the network.
Begin with store.py.
"""
