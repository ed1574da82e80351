"""One module a verb: arguments, calls, printing."""
