"""`python -m knapformer_cli` and `torchrun -m knapformer_cli` are the `knapformer` command."""

from knapformer_cli.app import main

main()
