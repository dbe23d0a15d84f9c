"""Commands about the mode of the box: set, plan, schedule, history; and `simulate`.

Never: Decides, except `simulate`, which runs the scheduler's own code on a trace.
Begin with mode.py.
"""
