"""The `appliance` command: a thin HTTP client of the box, a package of commands for each subject.

Never: It imports neither Ray, torch, vLLM nor the openai package, and decides nothing.
Begin with main.py.
"""
