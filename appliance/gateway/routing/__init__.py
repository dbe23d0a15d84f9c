"""Chooses the replica for a request: the controller's table, the choice, and requests held until one is awake.

Never: Pure state: no sockets, no asyncio, no clock of its own.
Begin with router.py.
"""
