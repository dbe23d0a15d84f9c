"""Defines what every gateway package needs: settings, errors, and the table of routes.

Never: It opens no socket and holds no state.
Begin with routes.py.
"""
