
# The last words of a job: finished, preempted, stopped or failed, and where.
ended() {
    echo "job $SLURM_JOB_ID ended: $("$TELLER" -m knapformer_cli.slurm.ending "$run" "$1" "$2" || echo "$1 $2")"
}

# All nodes meet at the first one. No fallback: with a wrong head every node would train alone.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]:-}
if ! getent hosts "$head" > /dev/null; then
    echo "job $SLURM_JOB_ID ended: failed, the head node '$head' of $SLURM_JOB_NODELIST cannot be resolved"
    exit 2
fi
port=$((15000 + SLURM_JOB_ID % 15000)) # below what Linux gives to clients; jobs that share a node differ

stopped='' code=0
trap 'stopped=yes' TERM # scancel, the end of the time, or Slurm's own preemption; the ranks are told as well

# One launcher a node. USR1 is ignored until it listens, for Slurm may send it in the first second.
# When one launcher has ended, srun gives the others half a minute.
# shellcheck disable=SC2016 # each node expands its own variables
srun --wait=30 "${CONTAINER[@]}" \
    bash -c 'trap "" USR1; exec "$@" --node-rank "$SLURM_NODEID" --address "$SLURMD_NODENAME"' launcher \
    "$PYTHON" -m knapformer_cli.node "$run/config.yaml" \
    --nodes "$SLURM_JOB_NUM_NODES" --head "$head:$port" --id "$SLURM_JOB_ID-$starts" || code=$?

if [ -n "$stopped" ]; then
    ended stopped "by Slurm"
elif [ "$code" -ne 0 ]; then
    ended failed "with exit code $code"
elif [ ! -e "$run/PREEMPTED" ]; then
    ended finished ""
elif [ "$starts" -ge "$REQUEUES" ]; then
    ended preempted "and not requeued (slurm.requeues=$REQUEUES is reached; submit again to go on)"
    code=1
else
    ended preempted "and requeued ($((starts + 1)) of $REQUEUES)"
    trap - TERM # with which the requeue ends this script
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
    ended preempted "but Slurm did not requeue it; submit again to go on"
    code=1
fi
exit "$code"
