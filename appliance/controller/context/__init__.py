"""What every route is given: the context, the audit log, and work that outlasts a request.

Never: It holds references and no rules.
Begin with context.py.
"""
