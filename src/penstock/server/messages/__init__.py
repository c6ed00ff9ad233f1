"""`/v1/messages`, in the form of Anthropic's API: bodies, events, errors."""
