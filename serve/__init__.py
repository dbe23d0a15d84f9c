"""Serving: vLLM engines that fork from a warm parent, take new weights from shared memory while requests wait,
sleep and wake, and the routing that stands in front of them."""
