"""DFlash (arXiv 2602.06036): block-diffusion drafters for speculative decoding, the method alone.

Needs torch and transformers; imports nothing else of this project.
"""
