"""Plugs into vLLM and changes it: arguments, front end, workers, load format, patches.

Never: Decides policies of the box.
Begin with frontend.py, worker.py, patches.py.
"""
