"""Runs the scheduler's loop in virtual time: traces, simulated engines and jobs, and an oracle for comparison.

Never: Imported by code that runs a box.
Begin with simulate.py.
"""
