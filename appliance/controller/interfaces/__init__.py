"""The controller's settings, errors and principals.

Never: Imports another package of the controller.
Begin with principal.py.
"""
