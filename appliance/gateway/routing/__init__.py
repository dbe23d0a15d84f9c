"""Chooses the replica for a request: the controller's table, the choice, and the fair queue of those that wait.

Never: Opens a socket or reads a clock; it is state without asyncio.
Begin with router.py.
"""
