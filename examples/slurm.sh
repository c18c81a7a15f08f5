#!/bin/bash
# sbatch examples/slurm.sh: two machines with eight GPUs each. Where SLURM takes a machine away, or time runs out, the job
# ends behind a commit, is queued again, and goes on. DIRECTORY is one of each machine's own.
#SBATCH --job-name=zero-offload
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${RANKS:-8}" --max-restarts 3 --rdzv-backend c10d \
  --rdzv-endpoint "$head:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID" examples/several_machines.py "${DIRECTORY:-/local/run}"
status=$?
# An error of the program comes again with each start: these are few.
if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
