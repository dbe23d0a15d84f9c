"""Parts that all control routes share: strict bodies, paging, audit, idempotency.

Never: Knows a specific route, or any table except the one for idempotency keys.
Begin with resource.py, then routers.py.
"""
