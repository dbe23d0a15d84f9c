"""Contains everything that plugs into vLLM or changes it: arguments, workers, load format, patches.

Never: Decides for the box.
Begin with plugin.py, worker.py, patches.py.
"""
