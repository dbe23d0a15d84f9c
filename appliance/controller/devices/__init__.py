"""State of devices and nodes for the API: cordons, lost nodes, sizes, meters, the mode, the measured copy limit.

Never: Touches a device; wiring and the scheduler do.
Begin with mode.py.
"""
