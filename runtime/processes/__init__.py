"""Manages processes and their lifetimes: warm parents that fork, lifelines, death with the parent, the OOM order.

Never: Knows engines or ranks: an entry point is a string `module:function`.
Begin with warm_parent.py, child.py.
"""
