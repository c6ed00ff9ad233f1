"""What `bench/sources.py` measures: a module for each public document that asks for it."""
