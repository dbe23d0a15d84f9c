"""Commands for the box's own machine: up, down, join, init, doctor, support, backup and restore.

Never: Decides: each is a thin client of the admin API, or, where no box may run, starts the process that does the work.
Begin with box.py.
"""
