"""Serving: vLLM engines that fork from a warm parent, swap weights while requests wait, sleep and wake.

Reading order: core.spec -> engine.replica -> engine.main -> engine.control -> load.load_plan -> vllm.plugin.
"""
