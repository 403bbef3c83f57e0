
# This code, whatever else lies in the folder where the job starts.
export PYTHONPATH=$CODE PYTHONSAFEPATH=1
starts=${SLURM_RESTART_COUNT:-0}
run=$RUN${SLURM_ARRAY_TASK_ID:+/$(printf %02d "${SLURM_ARRAY_TASK_ID:-0}")} # an element of an array has its own

mkdir -p "$run/logs"
echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}" > "$run/JOB"
echo "job $SLURM_JOB_ID, start $((starts + 1)), $(date -Is): $run on $SLURM_JOB_NODELIST, code $CODE"
