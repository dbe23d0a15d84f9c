"""Real clients against a box with a real model, by `make clients`: see README.md. Each script runs in its own
environment; only clients.py, table.py and run.py use this project's environment."""
