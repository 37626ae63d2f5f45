"""What to apply so that a job runs elsewhere: a RayJob for KubeRay, a batch script for Slurm, a compose file for Docker.

Runs anywhere: plain python and yaml. Only text is made here; nothing is started.

    cli/deploy.py -> nodes.py      how many nodes, and what each has
                  -> kuberay.py    manifests; tests hold them against a strict model of KubeRay's API
                  -> slurm.py      a batch script
                  -> compose.py    a compose file for two containers on one machine
"""
