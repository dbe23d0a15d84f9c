"""Who holds which devices, and how they change hands.

Reading order: core.workload -> plan.plan -> handover.handover -> loop.loop -> ray.effects.
Only `scheduler.ray` knows Ray, the trainer and the engines; everything else decides or keeps records.
"""
