"""The foundation models and classifiers: the only doors to diffusers and transformers."""
