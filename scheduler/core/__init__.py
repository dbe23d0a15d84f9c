"""Values and rules that everybody shares: devices and their ledger, workloads, allocation, failures, settings.

Never: Pure: no clock, no I/O, no knowledge of other packages.
Begin with workload.py, inventory.py.
"""
