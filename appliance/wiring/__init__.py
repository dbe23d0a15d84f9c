"""Implements the controller's ports on top of the scheduler, the engines and the weights, one file per port.

Never: Contains rules, or state beyond what a port needs.
Begin with scheduler_port.py.
"""
