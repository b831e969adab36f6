"""What programs read: files, records, examples, pictures, queues and datasets."""
