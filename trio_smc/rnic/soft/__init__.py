"""The software RNIC: RDMA between processes of one host."""
