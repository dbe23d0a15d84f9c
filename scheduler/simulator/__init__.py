"""The same loop in virtual time: traces, simulated engines and jobs, and the oracle they are compared with.

Never: Nothing that runs a box imports it.
Begin with simulate.py.
"""
