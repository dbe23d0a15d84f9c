"""Plans which holder gets which devices: shares, queue, exact devices. Pure functions of a `PlanInput` and a time.

Never: Knows how devices change hands, or any current state outside its input.
Begin with plan.py.
"""
