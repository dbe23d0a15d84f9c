"""The bus between controller and gateway: it sends routing tables and receives load and usage reports; and requests of
the box's own work through the gateway.

Never: Decides routing or stores anything.
Begin with bus.py.
"""
