"""Routes of the admin API for people: keys and their limits, usage, and forgetting a person.

Never: Authenticates; the caller passes a principal.
Begin with keys.py.
"""
