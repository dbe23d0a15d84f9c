"""The control loop, sole owner of the scheduler's state (observe, plan, act), and the status texts it produces.

Never: Changes the world except through effects and ports.
Begin with loop.py.
"""
