"""The `appliance` command: a thin HTTP client, a table of the box's resources, and further commands.

Never: Imports Ray, torch, vLLM or the openai package, or makes decisions.
Begin with resources.py.
"""
