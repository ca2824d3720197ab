"""The `osfl` command, the topmost layer: no other package imports it."""
