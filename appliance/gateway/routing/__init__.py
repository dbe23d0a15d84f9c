"""Which replica answers: the table of the controller, the choice, and requests held until one is awake.

Never: Pure state: no sockets, no asyncio, no clock of its own.
Begin with router.py.
"""
