"""The control loop (observe, plan, act), the only owner of the scheduler's state, and texts on its status.

Never: Changes the world except through the effects, the journal and the store.
Begin with loop.py.
"""
