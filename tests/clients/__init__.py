"""Real clients against a box with a real model: `make clients`, see README.md. Each script runs in an environment of
its own; only clients.py, table.py and run.py are this project's."""
