"""Job specs: load, plan, render, submit; the attempt's claim and the requeue decision."""
