"""The streaming engine: runs a Mixture-of-Experts GGUF with only its routed experts in memory.

This package knows llama.cpp and never imports the app. What others may use is listed here:
a `Session` owns one opened model and one conversation timeline; a `RunConfig` says how to run it.
"""
