"""The client of the engine, inside the API server: it submits requests, prepares images and hands out answers."""
