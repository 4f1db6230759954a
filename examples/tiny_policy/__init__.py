"""The parts of `train_tiny_policy.py`: a tiny language model, its server, and its trainer."""
