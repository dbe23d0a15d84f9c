"""The main process of a box or of a further node: it boots, watches and ends the other processes, in order.

Never: Decides about devices or models, or holds state that a restart would miss.
Begin with main.py (a box), node.py (a further node).
"""
