"""One rank as a process: it prepares, steps, saves between steps, and leaves when it is told to.

Never: It decides nothing about devices.
Begin with worker.py, then loop.py.
"""
