"""What the lab's experiments amount to: values that are written as JSON, and the folder they are written to."""
