"""Decides what has memory to start: reads each host's, gives back what nobody needs, holds back jobs and engines until
there is room.

Never: Starts, stops or suspends anything; the scheduler's loop asks here for limits, and is nudged.
Begin with box_memory.py.
"""
