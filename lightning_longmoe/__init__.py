"""Mixture-of-experts language models at long context in PyTorch Lightning."""
