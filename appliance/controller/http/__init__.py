"""Shared by all control routes: strict bodies, paging, audit, idempotency.

Never: Knows a specific route, or any table except the one for idempotency keys.
Begin with resource.py, then routers.py.
"""
