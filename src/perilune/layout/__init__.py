"""What a model consists of, by name: the tensors a configuration implies, and how they may be cut. Torch-free."""
