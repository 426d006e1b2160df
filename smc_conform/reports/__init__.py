"""Reports of a run: on a terminal, as JSON, as JUnit XML and as an HTML page.

The JSON report is the source of the others: `document` makes it from the results, and
`smc-conform compare` reads two of them.
"""
