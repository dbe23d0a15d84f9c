"""Runs one rank as a process: prepares, steps, saves between steps, and leaves on command.

Never: It assigns no devices.
Begin with worker.py, then loop.py.
"""
