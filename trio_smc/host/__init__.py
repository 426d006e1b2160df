"""This machine: netlink, addresses, PNET table, private directories, TCP sockets."""
