"""Loads a version's bytes into a model: records the copies of the first load and repeats them for later versions.

Never: Handles requests.
Begin with loader.py, then load_plan.py.
"""
