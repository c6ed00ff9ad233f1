"""Videos of a request: decoded by processes of their own, of which each can be killed alone."""
