"""Prompt embeddings of a request: how they are sent, and the prompts that they become."""
