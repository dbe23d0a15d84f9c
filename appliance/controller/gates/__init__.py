"""Gates: a version that a job made answers only once its suites say that it may.

Never: Asks a model itself (evals do), or moves weights (models do).
Begin with verdict.py, then runner.py.
"""
