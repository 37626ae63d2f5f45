"""What to apply so that a job runs elsewhere: a RayJob for KubeRay, a batch script for Slurm, a compose file for Docker.

Runs anywhere: plain python, pydantic and yaml. Only text is made here; nothing is started.

    cli/deploy.py -> nodes.py      how many nodes, and what each has
                  -> kuberay.py    manifests, built of a strict model of the part of KubeRay's API that is used
                  -> slurm.py      a batch script
                  -> compose.py    a compose file for two containers on one machine
"""
