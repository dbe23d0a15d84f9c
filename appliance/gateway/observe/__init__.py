"""Reports on the gateway: access log, metrics, traces.

Never: Changes what happens to a request.
Begin with metrics.py.
"""
