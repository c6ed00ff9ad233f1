"""What `bench/serve.py` measures: servers as processes of their own, asked over HTTP."""
