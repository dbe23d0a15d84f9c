"""What every control route shares: strict bodies, error shapes, paging, audit, idempotency, request ids.

Never: It knows no single route and no table but the one of idempotency keys.
Begin with routers.py.
"""
