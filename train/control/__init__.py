"""Controls a job's ranks from outside: starts all ranks together, commands and watches them, and stops them together.

Never: Imports torch where it runs in a supervisor (group.py).
Begin with group.py.
"""
