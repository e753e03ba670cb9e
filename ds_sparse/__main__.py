"""`python -m ds_sparse` is the command line, as `ds_sparse` is."""

from .cli import main

raise SystemExit(main())
