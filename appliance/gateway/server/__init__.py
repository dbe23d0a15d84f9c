"""Handles client connections: parses requests, admits or refuses each in order, and dispatches it to a handler.

Never: It relays nothing to engines or controller itself.
Begin with client_connection.py, then dispatch.py.
"""
