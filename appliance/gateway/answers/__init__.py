"""Reads answers of engines as they pass: tokens spent, the text to go on from, the turn that a response keeps.

Never: It opens no socket, reads no clock and holds no state.
Begin with usage.py, then continuation.py.
"""
