"""Makes one signed file with which a machine without a network becomes a box, and moves a box between releases.

Never: Runs the box itself (it calls the `appliance` of a release), or reads what only the database's own room knows.
Begin with main.py, then make.py (the file), carried/ (what it installs itself with), upgrade.py and rollback.py.
"""
