"""Carry out operations: the changes to messages, and the steps in which workers make them."""
