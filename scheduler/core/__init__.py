"""Values and rules that all sub-packages share: devices, holders, workloads, allocation, failures, settings.

Never: Reads a clock, does I/O or imports another package of the scheduler.
Begin with workload.py.
"""
