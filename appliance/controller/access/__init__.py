"""What a caller may see, keep and spend: models by owner, names, quotas, spending, free disk.

Never: It does not authenticate; it is handed a principal.
Begin with quotas.py.
"""
