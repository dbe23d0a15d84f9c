"""The bus between controller and gateways: it sends routing tables, receives load and usage reports, and learns from
them what each model's traffic needs.

Never: Decides routing or stores anything.
Begin with bus.py.
"""
