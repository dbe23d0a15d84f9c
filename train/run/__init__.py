"""Runs one rank as a process: prepares, steps, saves between steps, and leaves on command.

Never: Assigns devices.
Begin with worker.py, then loop.py.
"""
