"""Power of the devices: which limits hold when, the helper that sets them as root, and what energy costs.

Never: Knows the store, or reads a meter. Without a configured helper nothing here touches a device.
Begin with settings.py, then profiles.py; helper.py is a process of its own, which root runs.
"""
