"""Chooses the replica for a request: the controller's table, the choice, and requests held until one is awake.

Never: Opens a socket or reads a clock; it is state without asyncio.
Begin with router.py.
"""
