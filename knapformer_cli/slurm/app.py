"""`knapformer slurm ...`, thin: imports nothing heavy until a command runs."""

from pathlib import Path
from typing import Annotated

import typer

slurm_app = typer.Typer(no_args_is_help=True, help="Train on a Slurm cluster: submit, watch, cancel.")

Run = Annotated[Path, typer.Argument(help="The run folder, or the folder of a sweep.")]


@slurm_app.command("train")
def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings as for `knapformer train`; slurm=SITE takes a site's defaults."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes; default: launch.nodes.")] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(help="GPUs of a node, a rank each; 0 trains on CPU, launch.ranks ranks a node."),
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Limit of one start, such as 8:00:00 or 2-00:00:00.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that pays.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features that the nodes must have.")] = None,
    container: Annotated[str | None, typer.Option(help="Image, for Slurm with the pyxis plugin.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job; else print its script.")] = False,
    dependency: Annotated[str | None, typer.Option(help="Other jobs to wait for: afterok:123.")] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="A job array, one run for each combination of a=1,2 b=x,y.")
    ] = False,
    array: Annotated[
        str | None, typer.Option(help="Elements of the sweep and how many at once: 0-7%2.")
    ] = None,
) -> None:
    """Write RUN/config.yaml and RUN/submit.slurm for several nodes, with the code as it is now."""
    from knapformer_cli.packages import check_packages

    check_packages()
    from knapformer_cli.slurm.submit import Request, train_command

    request = Request(
        nodes, gpus_per_node, time, partition, account, qos, constraint, container, dependency, array
    )
    train_command(overrides or [], request, submit, sweep)


@slurm_app.command("profile")
def profile(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as for `knapformer profile`; slurm=SITE as above.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs; 0 measures a CPU.")] = 1,
    time: Annotated[str | None, typer.Option(help="Limit, such as 0:30:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that pays.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job; else print its script.")] = False,
) -> None:
    """Write RUN/submit.slurm that calibrates on one device and profiles the settings with the fit."""
    from knapformer_cli.packages import check_packages

    check_packages()
    from knapformer_cli.slurm.submit import Request, profile_command

    request = Request(1, gpus_per_node, time, partition, account)
    profile_command(overrides or [], request, submit)


@slurm_app.command("status")
def status(run: Run) -> None:
    """Say where a run stands: state and reason, step, checkpoint, restarts, how it ended."""
    from knapformer_cli.slurm.jobs import status_command

    status_command(run)


@slurm_app.command("logs")
def logs(
    run: Run,
    lines: Annotated[int, typer.Option(help="How many of the last lines.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job has ended.")] = False,
) -> None:
    """Print the end of a run's log."""
    from knapformer_cli.slurm.jobs import logs_command

    logs_command(run, lines, follow)


@slurm_app.command("cancel")
def cancel(run: Run) -> None:
    """Cancel the job of a run; its ranks save before they end."""
    from knapformer_cli.slurm.jobs import cancel_command

    cancel_command(run)
