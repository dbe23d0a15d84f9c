"""Everything that plugs into vLLM or changes it: arguments, transfer backend, load format, patches.

Never: No decision of the box stands here.
Begin with plugin.py, patches.py.
"""
