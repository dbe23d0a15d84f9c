"""Contains everything that plugs into vLLM or changes it: arguments, transfer backend, load format, patches.

Never: Decides for the box.
Begin with plugin.py, patches.py.
"""
