"""The box's only truth: one SQLite database for all threads of the controller.

Never: Decides; the SQL of each kind of object stands in the packages below.
Begin with rows.py, which declares the tables, and database.py.
"""

from appliance.store import rows as rows
