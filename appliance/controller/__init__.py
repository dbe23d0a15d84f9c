"""The control side of the box: files, fine-tuning jobs, models and administration over HTTP, and the gateways' bus."""
