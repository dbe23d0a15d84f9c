"""Checks request bodies, rewrites them for engines, and tracks answers so that they can be continued and stored.

Never: Opens a socket, reads a clock or holds state.
Begin with request_check.py, then normalize.py.
"""
