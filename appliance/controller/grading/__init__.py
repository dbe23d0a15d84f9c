"""Grades answers by OpenAI's graders: evaluations of models, jobs that train on their model's own answers, and routes
that try a grader.

Never: Grades anything itself (train.graders does, in a process of its own), or takes an engine from interactive
requests.
Begin with judging.py.
"""
