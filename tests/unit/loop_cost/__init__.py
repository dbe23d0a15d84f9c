"""What the controller's event loop does for each route and each round, counted and not timed, as an owner keeps more.

Begin with test_loop_cost.py.
"""
