"""The data path of a worker with a GPU: ``make bench-gpu``, and ``session.sh`` for ten minutes on a card."""
