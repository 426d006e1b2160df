"""The directory that `trio-smc run` adds to PYTHONPATH, with the hook `sitecustomize`."""
