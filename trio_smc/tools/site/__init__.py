"""The directory that `trio-smc run` puts on a program's path; see its `sitecustomize`."""
