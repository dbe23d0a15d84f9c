"""The bus between controller and gateway, which sends routing tables and receives reports of load and usage; and the
box's own requests through the gateway.

Never: Decides routing or stores anything.
Begin with bus.py.
"""
