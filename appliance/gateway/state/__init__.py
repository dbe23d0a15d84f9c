"""Holds one gateway process's state (settings, current table, held requests, counters, buffers) and reports it.

Never: It opens no listener and answers no request.
Begin with state.py.
"""
