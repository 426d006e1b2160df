"""The parts of a `Stack`: nursery, link groups, RNICs, policy."""
