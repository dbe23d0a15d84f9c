"""What the gateway says of itself: access log, metrics, traces.

Never: Nothing here changes what happens to a request.
Begin with metrics.py.
"""
