"""What a server counts, and how its processes read it."""
