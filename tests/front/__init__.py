"""The real gateway process in front of the real control app, with a canned engine: no Ray, no vLLM, no training."""
