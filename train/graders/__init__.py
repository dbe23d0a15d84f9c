"""Graders, as OpenAI's API defines them: they compute a reward from a model's answer and the item that it answers.

Never: Calls a model or holds a connection; a grader that asks a model returns the requests (`requests`), and the caller
brings the answers. Code of users runs only in children of sandbox.py.
Begin with graders.py, then grading.py.
"""
