"""How the bundled models are made. Not part of the wheel; run from the root of a checkout.

    python -m training.train --config pico      vocabulary, data, training, export, figures

Everything is a function of the seed: the chats are generated, not collected, and the vocabulary is learned on them.
"""
