"""HTTP/1.1 on both sides: what a connection is, the pool towards engines and controller, heads, shapes of errors.

Never: It decides nothing about models, keys and prices.
Begin with client.py, handler.py, upstream.py.
"""
