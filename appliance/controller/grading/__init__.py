"""Grades answers by OpenAI's graders: evaluations of models, jobs that learn from their own answers, and the routes
that try a grader.

Never: Grades anything itself (train.graders does, in a process of its own), or takes an engine from interactive
requests.
Begin with judging.py.
"""
