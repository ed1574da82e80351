"""The run directory: its layout, its ledger, and the page shared by a launch and its ranks."""
