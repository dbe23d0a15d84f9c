"""Store state about devices and nodes: cordons, lost nodes, sizes, the mode, the measured copy limit.

Never: Touches a device; wiring and the scheduler do.
Begin with mode.py.
"""
