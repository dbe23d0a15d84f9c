"""Contains everything that plugs into vLLM or changes it: arguments, transfer backend, load format, patches.

Never: It makes no decisions for the box.
Begin with plugin.py, patches.py.
"""
