"""What runs next: the queue and the token budget. Torch-free."""
