"""Reads answers of engines as they pass: tokens spent, the text to go on from, the turn that a response keeps.

Never: Opens a socket, reads a clock or holds state.
Begin with usage.py, then continuation.py.
"""
