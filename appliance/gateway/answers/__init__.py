"""Reads answers of engines as they pass: the text to go on from, the turn that a response keeps.

Never: Opens a socket, reads a clock or holds state.
Begin with continuation.py.
"""
