"""Where a run is started on machines that others own: a site's answers, and scripts and manifests for its scheduler."""
