"""Tables: embedding rows in pages, each page a variable on a ps; ids stay on the host."""
