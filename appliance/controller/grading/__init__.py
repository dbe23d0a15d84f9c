"""Grades answers of models by OpenAI's graders: the routes that try a grader, and asking the box's models for one.

Never: Grades anything itself; train.graders does, in a process of its own.
Begin with judging.py.
"""
