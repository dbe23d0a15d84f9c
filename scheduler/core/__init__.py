"""Values and rules that all sub-packages share: devices, holders, workloads, allocation, failures, settings.

It never reads a clock, does I/O or imports another package of the scheduler.
Begin with workload.py.
"""
