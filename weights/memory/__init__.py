"""Versions in shared memory: reserve, write, commit, lease, evict, safe against kill -9 at any point.

Never: It knows no model and no network.
Begin with store.py.
"""
