"""Checks the bodies of requests, and rewrites them from the forms that clients send into those that engines read.

Never: Opens a socket, reads a clock or holds state.
Begin with request_check.py, then meant.py.
"""
