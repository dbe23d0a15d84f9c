"""Plans which holder gets which devices: counts replicas, queues jobs, chooses exact devices. Pure functions of a
`PlanInput` and a time.

Never: Reads a clock, does I/O or keeps state between plans (except the standby learner, for its owner).
Begin with plan.py.
"""
