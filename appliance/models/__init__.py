"""Models on the box's disk: brought in (from a directory, a hub, or made here), checked, removed."""
