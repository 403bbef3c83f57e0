"""The commands, thin: each imports what it needs when it runs, so that --help answers at once."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from knapformer_cli.slurm.app import slurm_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train Diffusion Transformers on pictures and clips together, with every rank equally busy.",
)
data_app = typer.Typer(no_args_is_help=True, help="Make and look at data sets.")
app.add_typer(data_app, name="data")
app.add_typer(slurm_app, name="slurm")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings as key=value, e.g. training.steps=100 model=small; --dry-run prints them all."
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("knapformer"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback behind an error.")] = False,
) -> None:
    if debug:
        os.environ["KNAPFORMER_DEBUG"] = "1"


@app.command()
def train(
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the configuration and the command.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="One run for each combination of a=1,2 b=x,y.")
    ] = False,
) -> None:
    """Train a model; without settings, the digits recipe on this machine."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # waits until there are ranks to tell
    from knapformer_cli.packages import check_packages

    check_packages()
    from knapformer_cli import launch

    given = overrides or []
    if launch.in_torchrun():
        if dry_run or sweep:
            raise ValueError("--dry-run and --sweep are the launcher's; under torchrun a rank only trains")
        launch.train_as_rank(given)
    elif sweep:
        launch.train_sweep(given, dry_run)
    else:
        launch.train_run(given, dry_run)


@app.command()
def sample(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run folder for its newest.")],
    prompt: Annotated[list[str], typer.Option("--prompt", help="What to draw; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder for the drawings.")] = Path("samples"),
    size: Annotated[str, typer.Option(help="HEIGHTxWIDTH in pixels; default: the run's.")] = "",
    frames: Annotated[int, typer.Option(help="Frames; more than one draws clips.")] = 1,
    count: Annotated[int, typer.Option(help="Drawings of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Another seed draws others.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Euler steps; default: the run's.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; default: the run's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Draw pictures and clips from a checkpoint."""
    from knapformer_cli.packages import check_packages

    check_packages()
    from knapformer_cli.sample import sample_command

    sample_command(checkpoint, prompt, out, size, frames, count, seed, steps, guidance, device)


@app.command()
def profile(overrides: Overrides = None) -> None:
    """Plan many steps of a data mix for a cluster and compare layouts: tables, pictures, report.html."""
    from knapformer_cli.packages import check_packages

    check_packages()
    from knapformer_cli.profile.command import profile_command

    profile_command(overrides or [])


@app.command()
def calibrate(overrides: Overrides = None) -> None:
    """Measure the model on this machine and fit the workload model that planning and profiles use."""
    from knapformer_cli.packages import check_packages

    check_packages()
    from knapformer_cli.calibrate import calibrate_command

    calibrate_command(overrides or [])


@app.command()
def doctor(overrides: Overrides = None) -> None:
    """Check this machine for training and print what to fix."""
    from knapformer_cli.packages import check_packages

    check_packages()
    from knapformer_cli.doctor import doctor_command

    doctor_command(overrides or [])


@data_app.command("demo")
def data_demo(
    out: Annotated[Path, typer.Option(help="Folder for the shards.")] = Path("datasets/digits"),
    seed: Annotated[int, typer.Option(help="The same seed makes the same bytes.")] = 0,
) -> None:
    """Make the digits demo set: pictures and clips of scanned digits, as WebDataset shards."""
    from knapformer_cli.data_commands import demo_command

    demo_command(out, seed)


def main() -> None:
    """Run the command line; a user's error is one sentence and exit code 2."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        if os.environ.get("KNAPFORMER_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
