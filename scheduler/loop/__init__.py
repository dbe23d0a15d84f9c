"""The control loop (observe, plan, act), sole owner of the scheduler's state, and its status texts.

Never: Changes the world except through the effects, the journal and the store.
Begin with loop.py.
"""
