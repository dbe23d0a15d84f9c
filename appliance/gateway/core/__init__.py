"""Definitions that the whole gateway shares: settings, errors, URLs, the routing table, quotas and replica choice.

Never: Opens a socket.
Begin with routes.py, then router.py.
"""
