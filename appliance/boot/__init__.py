"""The main process of a box or of a further node: it boots, watches and ends the other processes, in order.

Never: It decides nothing about devices or models and holds no state that a restart would miss.
Begin with main.py (a box), node.py (a further node).
"""
