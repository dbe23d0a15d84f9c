"""The whole loop as a newcomer sees it first (`make demo`), and the steady load that it and the tests use.

Never: Nothing that runs a box imports it.
Begin with main.py.
"""
