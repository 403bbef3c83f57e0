
# The configuration of the run, composed once; later starts read what is written.
if [ ! -e "$run/config.yaml" ]; then
    settings=("${SETTINGS[@]}" "launch.nodes=$SLURM_JOB_NUM_NODES" "run.dir=$run")
    [ "${#SWEEP[@]}" -eq 0 ] || settings+=("${SWEEP[$SLURM_ARRAY_TASK_ID]}")
    if ! srun --nodes=1 --ntasks=1 "${CONTAINER[@]}" \
        "$PYTHON" -m knapformer_cli train --dry-run "${settings[@]}" > "$run/.config.yaml"; then
        echo "job $SLURM_JOB_ID ended: failed, its settings were refused"
        exit 2
    fi
    mv "$run/.config.yaml" "$run/config.yaml"
fi
