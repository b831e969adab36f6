"""Launch files for the engines that start clusters: `python -m harness.manifests`."""
