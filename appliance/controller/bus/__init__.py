"""The bus between the controller and its gateways: routing tables out, load and usage in.

Never: It decides no routing and stores nothing.
Begin with bus.py.
"""
