"""Keeps versions in shared memory: reserve, write, commit, lease, evict, safe against kill -9 at any point.

Never: It depends on no model and uses no network.
Begin with store.py.
"""
