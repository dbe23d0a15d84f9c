"""State of devices and nodes for the API: cordons, lost nodes, sizes, meters, the mode.

Never: Touches a device; only the scheduler does.
Begin with mode.py.
"""
