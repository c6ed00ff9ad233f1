"""The same decode steps in the formats of vLLM and in ours. Leaves to `tools.capture` live processes."""
