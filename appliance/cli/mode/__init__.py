"""Commands about the mode of the box: set, plan, schedule, history.

Never: Decides.
Begin with mode.py.
"""
