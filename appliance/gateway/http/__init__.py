"""Which headers pass in each direction, what an error looks like, and the endpoint's certificate.

Never: Decides about models, keys or prices.
Begin with wire.py.
"""
