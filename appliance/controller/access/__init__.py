"""What a caller may see, store and spend: names and owners of models, quotas, usage, free disk.

Never: Authenticates; the caller passes a principal.
Begin with limits.py.
"""
