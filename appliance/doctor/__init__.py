"""Looks at the machine and the box on it: each check says what it measured, what was expected and what to do.

Never: Changes anything, or takes a device.
Begin with checks.py.
"""
