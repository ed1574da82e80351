"""The one door to S3 and to instance metadata."""
