"""Evaluations by OpenAI's API: graders over items, run with answers that a model of the box gives or that the data has.

Never: Grades anything itself (train.graders), or takes an engine from interactive requests.
Begin with evals.py.
"""
