"""A load generator for any server with OpenAI's API. It imports no engine."""
