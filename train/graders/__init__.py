"""Graders of OpenAI's API: each computes a reward from a model's answer and the item that it answers.

Never: Calls a model or holds a connection; a grader that asks a model returns its requests (`requests`), and the caller
passes in the answers. Users' code runs only in child processes of sandbox.py.
Begin with graders.py, then grading.py.
"""
