"""Models on the box's disk: imports them from a directory or a hub, checks them, removes them.

Never: Serves a model or moves one into shared memory.
Begin with library.py.
"""
