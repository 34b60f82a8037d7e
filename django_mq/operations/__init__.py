"""Carry out operations: the changes of messages, and the steps in which workers make them."""
