"""Serving: vLLM engines that fork from a warm parent, take new weights from shared memory while requests wait,
sleep and wake.

Reading order: core.spec -> engine.replica -> engine.main -> engine.control -> load.load_plan -> vllm.plugin.
"""
