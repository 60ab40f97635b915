"""What a report says: one file a section, each a function from a `Run` to blocks. Nothing here knows HTML."""
