"""The main process of a box or of a further node: starts, supervises and stops the other processes in order.

Never: Decides about devices or models, or holds state that a restart would lose.
Begin with main.py (a box), node.py (a further node).
"""
