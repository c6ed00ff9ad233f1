"""What `bench/vllm.py` measures: vLLM as it is, vLLM with readers that park after 2 ms, and vLLM on Penstock.

ways           the three, as interpreters and environments       parking, sleeping  plugins that the benchmark needs
vllm_server    `vllm serve`, and the memory that it reserves     serving            loads: serve, serve-images, idle
queue_process  vLLM's queue in processes of their own            queues             steps and tensors by the queue alone
models         the models that are served                        goals              what was to be reached
"""
