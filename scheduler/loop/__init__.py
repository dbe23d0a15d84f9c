"""The one owner of the scheduler's state: look, plan, act, again; and what people are told of it.

Never: It touches the world through effects and ports alone.
Begin with loop.py.
"""
