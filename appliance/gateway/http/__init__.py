"""HTTP/1.1 on both sides: clients' connections, the pool towards engines and controller, heads, shapes of errors.

Never: It knows no model, no key and no price.
Begin with server.py, upstream.py.
"""
