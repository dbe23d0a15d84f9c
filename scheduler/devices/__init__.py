"""Which devices this node has, and whether they are healthy.

Never: It assigns none.
Begin with discovery.py.
"""
