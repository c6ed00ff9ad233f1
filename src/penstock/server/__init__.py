"""The API server: the engine behind OpenAI's HTTP API."""
