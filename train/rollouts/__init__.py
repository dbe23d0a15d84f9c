"""The samples of a step of a method that learns from the model's own answers: sampled by an engine of the box or by the
ranks, judged by a grader or a teacher, turned into rows.

Never: Decides what is learnt from them (train.methods).
Begin with rollouts.py.
"""
