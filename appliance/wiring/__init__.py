"""The controller's ports carried out on the scheduler, the engines and the weights, one file per port.

Never: It owns no state but what a port needs, and no rule.
Begin with scheduler_port.py.
"""
