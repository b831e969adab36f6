"""The parts of the Saver: layout on disk, manifest, Orbax, reading."""
