"""Manages processes and their lifetimes: warm parents that fork, lifelines, death with the parent, the OOM order.

Never: Knows an engine or a rank: an entry is a name `module:function`.
Begin with warm_parent.py, child.py.
"""
