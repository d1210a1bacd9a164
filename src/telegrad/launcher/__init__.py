"""Start the workers of a program, supervise them, and restart those that fail.

`functions.launch` starts a function, `telegrad launch` (`cli/launch`) a script. Both use torch's
elastic launcher. That restarts all processes of its group if one fails; here, a worker restarts
alone, under its name, while the others go on. Therefore each worker has an elastic launcher of its
own (`elastic`). This process hosts the store of the group, which outlives every worker. On
clusters, Slurm, Kubernetes or Ray start and restart the workers (`slurm`, `kubernetes`,
`ray_actors`).

Importing this package does not import torch, so that `telegrad --help` is fast.
"""
