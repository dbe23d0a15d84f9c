"""Reports on the gateway: access log, metrics, traces.

Never: Nothing here changes what happens to a request.
Begin with metrics.py.
"""
