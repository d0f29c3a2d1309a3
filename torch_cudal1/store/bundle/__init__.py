"""What a deployment carries as files: bundles, locks, coverage."""
