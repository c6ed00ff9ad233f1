"""Prompt embeddings of a request: the files, and the prompts."""
