"""Controls a job's ranks from outside: starts them together, commands and watches them, stops them at one point.

Never: Imports torch where it runs in a supervisor (group.py).
Begin with group.py.
"""
