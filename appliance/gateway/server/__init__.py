"""Clients' connections: bytes become requests, each is admitted or refused in its turn, and somebody answers it.

Never: It relays nothing itself, to neither engine nor controller.
Begin with client_connection.py, then dispatch.py.
"""
