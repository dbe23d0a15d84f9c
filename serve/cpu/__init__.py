"""What only the CPU engine needs: a worker that sleeps, staged versions, finishing streams, LoRA.

Never: A GPU box runs none of it.
Begin with worker.py.
"""
