"""The `appliance` command: a thin HTTP client. It imports neither Ray, torch, vLLM nor the openai package."""
