"""The controller's settings, errors, principals and records.

Never: Imports another package of the controller.
Begin with principal.py.
"""
