"""Loads a version's bytes into a model: records the first load's copies and replays them for later versions.

Never: Handles requests.
Begin with loader.py, then load_plan.py.
"""
