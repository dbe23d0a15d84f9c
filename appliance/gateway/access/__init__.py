"""One request's record, what its key may spend, and what is counted of it: metrics, load, usage, traces.

Never: Reads a body or opens a client's connection.
Begin with request.py.
"""
