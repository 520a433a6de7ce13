"""Optimizers under sharding."""
