"""Commands about models: import, deploy, canary, chat, the tiers that keep them, and plans of what would fit.

Never: Decides: each is a thin client of the OpenAI and admin APIs.
Begin with model.py.
"""
