"""HTTP in front of the engine: OpenAI's chat completions, model list, health. Torch-free."""
