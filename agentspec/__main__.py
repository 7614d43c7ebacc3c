"""python -m agentspec."""

from agentspec.cli import main

raise SystemExit(main())
