"""Checks of training data that the box has, and files made from it: in processes of their own, one at a time for each
owner, and after each upload by the box itself.

Never: Parses a file, or changes one; a preparation makes another.
Begin with data_routes.py, then data_work.py.
"""
