"""What every route receives: the context, the audit log, and work that outlives a request.

Never: Contains rules; the package holds references.
Begin with context.py.
"""
