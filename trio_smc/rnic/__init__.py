"""RNICs: the interface in `verbs`, the software RNIC and RoCE ports, the poller and the drain."""
