"""Checks the bodies of requests. Pure functions over bytes.

Never: Opens a socket, reads a clock or holds state.
Begin with request_check.py.
"""
