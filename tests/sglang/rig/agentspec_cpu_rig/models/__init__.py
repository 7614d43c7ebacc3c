"""The models of the suite.

SGLANG_EXTERNAL_MODEL_PACKAGE names this package, so SGLang registers what is in it and imports none of its
own two hundred model files (half a minute on one core).
"""
