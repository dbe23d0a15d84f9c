"""The box's only truth: one SQLite database for all threads of the controller.

Never: Decides; tables stand in the packages below, one file each.
Begin with database.py and schema.sql.
"""
