"""Decides which job or model replica holds which devices, and moves devices between them.

Reading order: core.workload -> plan.plan -> handover.handover -> loop.loop -> ray.effects.
Only `scheduler.ray` uses Ray, the trainer and the engines; every other sub-package decides or keeps records.
"""
