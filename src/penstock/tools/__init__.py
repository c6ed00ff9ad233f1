"""What looks at, loads and compares a running server: each a folder of its own, none used by the engine."""
