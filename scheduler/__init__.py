"""Who holds which devices, and how they change hands.

Pure: inventory, workload, demand, queue, shares, placement, seating, plan, handover, step_rules.
Shell: loop, runner (through `Effects`).
Only `ray_*` know Ray, the trainer and the engines; everything else decides or keeps records.
"""
