"""`knapformer slurm ...`, thin: imports nothing heavy until a command runs."""

import typer

slurm_app = typer.Typer(no_args_is_help=True, help="Train on a Slurm cluster: submit, watch, cancel.")
