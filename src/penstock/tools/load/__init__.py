"""A load generator for servers that speak OpenAI's interface, whoever made them. It imports no engine."""
