"""Commands about the box: up, down, status, join, top, node, gpu, key, usage, audit, forget, backup, restore,
doctor, support.

Never: Decides: each is a thin client of the admin API, or, where no box may run, starts the process that does the work.
Begin with box.py.
"""
