"""The control loop, sole owner of the scheduler's state (observe, plan, act), and the status texts it produces.

Never: Changes the world except through the effects, the journal and the store.
Begin with loop.py.
"""
