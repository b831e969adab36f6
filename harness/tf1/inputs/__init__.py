"""The inputs of programs: files, records, examples, pictures, queues and datasets."""
