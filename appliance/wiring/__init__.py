"""Joins the controller's store and bus to the scheduler: each file implements one port, and owns nothing else."""
