"""The bus between controller and gateways: it sends routing tables and receives load and usage reports.

Never: Decides routing or stores anything.
Begin with bus.py.
"""
