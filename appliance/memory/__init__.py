"""Host memory of the box: decides what may start, frees memory that is not in use, and holds back jobs and engines
while memory is short.

Never: Starts, stops or suspends anything; the scheduler's loop reads limits here and is woken.
Begin with box_memory.py.
"""
