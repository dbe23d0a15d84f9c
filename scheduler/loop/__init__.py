"""The control loop (observe, plan, act), sole owner of the scheduler's state, and its status texts. It changes the
world only through the effects, the journal and the store.
Begin with loop.py.
"""
