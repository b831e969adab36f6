"""What the Saver is made of: layout on disk, manifest, Orbax, reading."""
