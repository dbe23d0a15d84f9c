"""Defines what every gateway package needs: settings, errors, and the table of routes.

Never: Opens a socket or holds state.
Begin with routes.py.
"""
