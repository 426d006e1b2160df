"""RNICs: the interface in `verbs`, the software RNIC, the poller thread and the shared drain."""
