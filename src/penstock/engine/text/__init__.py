"""Tokens as text, and text as SSE chunks: for output processors and API servers."""
