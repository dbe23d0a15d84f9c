"""Handles client connections: parses requests, admits or refuses each in order, and dispatches it to a handler.

Never: Relays anything to engines or controller itself.
Begin with client_connection.py, then dispatch.py.
"""
