"""The samples of a step of reinforcement: sampled by an engine of the box or by the ranks, graded, turned into rows.

Never: Decides what is learnt from them (train.methods).
Begin with rollouts.py.
"""
