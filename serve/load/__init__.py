"""Bytes of a version into a model: which go where, converted by several threads, in place or anew.

Never: It knows no request.
Begin with load_plan.py, then direct_load.py.
"""
