"""The same decode steps in vLLM's formats and in ours: `scripts/bench codec` measures them.

`workload` says what happens, `formats` what each format makes of it (`vllm2024`, `vllm_today`, `vllm_peer`, `ours`),
`rounds` measures them in turn, and `comparison` makes tables. `collective`: one broadcast beside gloo's.
"""
