"""Counters of a server, and the reading of snapshots."""
