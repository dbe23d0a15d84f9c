"""The `appliance` command: a thin HTTP client of the box, a package of commands for each subject.

Never: Imports Ray, torch, vLLM or the openai package, or decides.
Begin with main.py.
"""
