"""Tables with source and date."""
