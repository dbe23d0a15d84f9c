"""What every route receives: the context, the audit log, and work that outlives a request.

Never: Contains rules; the package only holds references to the components that do.
Begin with context.py.
"""
