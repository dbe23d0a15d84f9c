"""The controller's settings, errors and their shapes, and principals as its sockets identify them.

Never: Imports another package of the controller.
Begin with principal.py.
"""
