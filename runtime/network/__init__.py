"""Reaches other processes and machines: private Unix sockets, free ports, mutual TLS.

Never: Knows what is said over a connection once it stands.
Begin with sockets.py.
"""
