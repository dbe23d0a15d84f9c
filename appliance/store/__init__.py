"""The box's only truth: one SQLite database for all threads of the controller.

Never: Decides, or holds a rule of the API.
Begin with rows.py, which declares the tables, and database.py; the other files have the SQL of one kind of object each.
"""

from appliance.store import rows as rows
