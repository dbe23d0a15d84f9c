"""Loads a version's bytes into a model: plans which bytes go where, and converts them with several threads.

Never: Handles requests.
Begin with load_plan.py, then direct_load.py.
"""
