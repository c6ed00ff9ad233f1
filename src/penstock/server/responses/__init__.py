"""`/v1/responses`, as OpenAI has it: its bodies, its events, and the store of responses."""
