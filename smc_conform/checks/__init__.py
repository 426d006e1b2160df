"""The checks, one file for each area; see `smc_conform.registry`."""
