"""Commands about releases of the appliance: bundles, which install them, and moving the box between them.

Never: Does the work itself; `appliance.bundle` does, in a process of its own.
Begin with bundle.py.
"""
