"""Graders, as OpenAI's API defines them: they turn an answer of a model and the item that it answers into a reward.

Never: Calls a model or holds a connection; a grader that asks a model says what to ask (`requests`), and whoever
grades brings the answers. Code of users runs only in children of sandbox.py.
Begin with graders.py, then grading.py.
"""
