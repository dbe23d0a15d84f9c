"""The store's side of devices and nodes: cordons, lost nodes, sizes, the mode, the measured copy limit.

Never: It touches no device; wiring and the scheduler do.
Begin with mode.py.
"""
