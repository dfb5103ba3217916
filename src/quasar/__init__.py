"""Quasar: self-speculative decoding with an INT8 verifier (arXiv 2603.01399)."""

__version__ = "0.1.0"
