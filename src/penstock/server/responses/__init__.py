"""`/v1/responses`, in the form of OpenAI's API: bodies, events, and the store of responses."""
