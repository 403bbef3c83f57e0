
# What the model costs on this device, then what each layout would make of it.
code=0
one=(srun --nodes=1 --ntasks=1 "${CONTAINER[@]}" "$PYTHON" -m knapformer_cli)
"${one[@]}" calibrate "${SETTINGS[@]}" && "${one[@]}" profile "${SETTINGS[@]}" "run.dir=$run" || code=$?
echo "job $SLURM_JOB_ID ended: exit code $code"
exit "$code"
