"""Loads a version's bytes into a model: records where the first load puts them, and does it again for later ones.

Never: Handles requests.
Begin with loader.py, then load_plan.py.
"""
