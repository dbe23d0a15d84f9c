"""What every route receives: the context, the audit log, and work that outlives a request.

Never: Contains rules; it holds references.
Begin with context.py.
"""
