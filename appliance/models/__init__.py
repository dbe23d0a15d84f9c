"""Models on the box's disk: brought in (from a directory, a hub, or made here), checked, removed.

Never: Serves a model or moves one into shared memory.
Begin with library.py.
"""
