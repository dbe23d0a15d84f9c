"""The box as the scheduler sees it: jobs and deployments from the store, the journal of hand-overs, the runs of jobs.

Never: Decides who gets a device.
Begin with state_store.py.
"""
