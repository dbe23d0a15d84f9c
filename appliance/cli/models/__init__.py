"""Commands about models: import, deploy, canary, chat, and plans of what would fit.

Never: They decide nothing: each is a thin client of the OpenAI and admin APIs.
Begin with model.py.
"""
