"""Has answers keep to the form that a request asks for: a schema, an expression, a choice, the arguments of a tool.

Never: Reads a whole request, or writes an answer.
Begin with keywords.py, grammars.py.
"""
