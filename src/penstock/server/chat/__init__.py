"""From the body of a request to a prompt, and from output to the body of an answer."""
