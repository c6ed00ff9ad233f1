"""Penstock with other programs: each integration is imported by its host, and by nothing else of penstock.

`vllm` stands on the data plane: a plugin that replaces parts of vLLM. `ray_serve` stands on the server: it runs
`penstock serve` as replicas of Ray Serve.
"""
