"""Experiments behind the defaults: which outer optimizer, which learning rate."""
