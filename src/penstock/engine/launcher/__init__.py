"""The process that starts, watches and restarts the others."""
