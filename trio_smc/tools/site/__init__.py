"""The directory that `trio-smc run` adds to a program's path; see `sitecustomize` in it."""
