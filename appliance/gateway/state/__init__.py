"""Holds one gateway process's state (settings, current table, held requests, counters, buffers) and reports it.

Never: Opens a listener or answers a request.
Begin with state.py.
"""
