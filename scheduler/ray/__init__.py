"""The verbs carried out with Ray: actors, reservations, engines, groups of ranks, further nodes.

Never: It decides nothing; it is the one package of the scheduler that imports ray, train and serve.
Begin with effects.py.
"""
