"""Runs one rank as a process: prepares, steps, saves between steps, and stops on command.

Never: Assigns devices.
Begin with train.py, then worker.py.
"""
