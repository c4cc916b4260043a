"""The network: rotary tables, latent attention, routed experts, and the stack of layers."""
