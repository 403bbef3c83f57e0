"""From a configuration to a job of Slurm, and back to what became of it."""
