"""Submit jobs to clusters: site configuration, Slurm scripts and Kubernetes manifests."""
