"""The `appliance` command: a thin HTTP client, a table of what the box has, and packages of further commands.

Never: Imports Ray, torch, vLLM or the openai package, or decides.
Begin with resources.py.
"""
