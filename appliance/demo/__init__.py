"""The whole loop as a newcomer sees it first (`make demo`), and the steady load that it and the tests use.

Never: Runs a box: nothing that does imports it.
Begin with main.py.
"""
