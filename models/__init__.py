"""Reference Diffusion Transformers: packed MMDiT and DiT, text encoder, pixel codec, rectified flow.

Models are plain modules. They know nothing of ranks: attention comes in as a callable over packed tokens,
sharding is applied from outside, and zero rows of anything are ordinary input.
"""
