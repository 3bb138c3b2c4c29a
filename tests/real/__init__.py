"""Baton in front of real engines: vLLM and SGLang on the CPU, with a tiny model.

Everything the simulated engine claims is checked here against the engines themselves. Opt-in
(marker `real`), since each engine takes three gigabytes and half a minute to start; see
docs/testing.md.
"""
