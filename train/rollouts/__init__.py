"""Owns the samples of a step of a method that learns from the model's own answers: an engine of the box or the ranks
sample them, a grader or a teacher judges them, and they become rows.

Never: Decides what is learnt from them (train.methods).
Begin with rollouts.py.
"""
