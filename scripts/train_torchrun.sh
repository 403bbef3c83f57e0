#!/usr/bin/env bash
# Training on several machines without Slurm. Call it on each machine, from the same checkout on a shared disk:
#     scripts/train_torchrun.sh HEAD NODES RANKS SETTING...
#     scripts/train_torchrun.sh node0:29500 2 8 model=base run.dir=runs/two-nodes
set -euo pipefail

head=$1   # HOST:PORT of one of the machines, the same on all of them; torchrun numbers them by their arrival
nodes=$2  # machines
ranks=$3  # of a machine, one a GPU
shift 3   # what is left are settings, as for `knapformer train`

export PYTHONSAFEPATH=1 PYTHONPATH=$PWD # this checkout, and no other folder called models or data
export OMP_NUM_THREADS=1                # torchrun would say that it sets this

# USR1 asks all ranks to save and to end; torchrun itself would die of it.
trap '' USR1
exec .venv/bin/python -m torch.distributed.run \
    --nnodes="$nodes" --nproc-per-node="$ranks" \
    --rdzv-backend=c10d --rdzv-endpoint="$head" --rdzv-id=knapformer \
    -m knapformer_cli train "$@"
