"""The box: boot, configuration, store, controller, gateway, CLI."""

# Defaults of a box. They are defined here so that commands import little and `--help` is fast.
DEFAULT_DATA_DIR = "~/.local/share/appliance"
DEFAULT_PORT = 8000
