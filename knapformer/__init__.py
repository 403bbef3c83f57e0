"""KnapFormer: balance variable-length sequences over ranks and attend to the split ones."""
