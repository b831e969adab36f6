"""Example models trained with Bellwether; they run from a checkout and are not part of the installed distribution."""
