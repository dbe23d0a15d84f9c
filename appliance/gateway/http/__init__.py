"""Implements HTTP/1.1 on both sides: connections, the pool to engines and controller, heads, error formats.

Never: Decides about models, keys or prices.
Begin with client.py, handler.py, upstream.py.
"""
