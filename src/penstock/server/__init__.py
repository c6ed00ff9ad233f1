"""The server: the engine behind an HTTP interface that clients of OpenAI's speak."""
