"""The box's only source of truth: one SQLite database, which all threads of the controller share.

Never: Makes decisions or holds a rule of the API.
Begin with rows.py, which declares the tables, and database.py; each other file has the SQL for one kind of object.
"""

from appliance.store import rows as rows
