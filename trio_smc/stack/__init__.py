"""What a `Stack` runs and owns: nursery, link groups, RNICs, policy."""
