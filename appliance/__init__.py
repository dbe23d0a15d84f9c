"""What a person touches: boot, configuration, store, controller, gateway, CLI."""

# Where a box is by default. They stand here because commands import little, for the time of `--help`.
DEFAULT_DATA_DIR = "~/.local/share/appliance"
DEFAULT_PORT = 8000
