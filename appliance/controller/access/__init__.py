"""What a caller may see, keep and spend: models by owner, names, quotas, spending, free disk.

Never: Authenticates; the caller passes a principal.
Begin with limits.py.
"""
