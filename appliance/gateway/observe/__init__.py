"""What the gateway says of itself: access log, metrics, load reports, traces.

Never: Nothing here changes what happens to a request.
Begin with metrics.py.
"""
