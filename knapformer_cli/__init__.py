"""The `knapformer` command: configuration, launching, training, sampling and reports."""
