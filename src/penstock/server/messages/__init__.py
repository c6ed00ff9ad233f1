"""`/v1/messages`, as Anthropic has it: its bodies, its events, its errors."""
