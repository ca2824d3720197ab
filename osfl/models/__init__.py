"""The foundation models and classifiers; the only imports of diffusers and transformers."""
