"""What a person touches: boot, configuration, store, controller, gateway, CLI."""
