"""Models on the box's disk: brought in (from a directory, a hub, or made here), checked, removed.

Never: It serves none and moves none into shared memory.
Begin with library.py.
"""
