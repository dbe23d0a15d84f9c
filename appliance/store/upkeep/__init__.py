"""What looks across tables: what an owner holds, what is too old, and forgetting a person.

Never: Makes rows; it counts and deletes.
Begin with retention.py.
"""
