"""Rewrites requests from the forms that clients send into those that engines read, without changing their meaning.

Never: Bounds a request; payload does.
Begin with meant.py.
"""
