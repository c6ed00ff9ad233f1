"""Images of a request: their URLs, how they are fetched, and where they stand in a prompt."""
