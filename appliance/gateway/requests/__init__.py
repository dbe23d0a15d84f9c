"""Checks the bodies of requests, rewrites them into the form that engines read, and follows the answers: the text to
continue, the copy to store.

Never: Opens a socket, reads a clock or holds state.
Begin with request_check.py, then normalize.py.
"""
