"""The cases of `bench device`."""
