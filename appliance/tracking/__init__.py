"""Tells experiment trackers (MLflow, W&B) of jobs: one process beside the box, which reads the store.

It runs in the interpreter that has the trackers' libraries, which need not be the box's own: apart from these it
imports the standard library alone.

Never: Holds up a job, a request or the controller, or sends anything that the configuration does not ask for.
Begin with main.py, then follower.py.
"""
