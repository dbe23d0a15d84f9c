"""Muon of DeepSpeed, imported before DeepSpeed does so with its first engine.

Its module compiles its functions as it is imported, which loads 500 modules of inductor: six seconds of processor time.
It is not an optimizer of ours: the functions are left as they are written.
"""

from __future__ import annotations

from deepspeed.runtime import compiler

_compile = compiler.compile
compiler.compile = lambda *_, **__: lambda function: function
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401

compiler.compile = _compile
